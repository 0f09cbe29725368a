//! The messages and services of Envoy's rate limit and discovery protocols.
//!
//! `make proto` generates everything in the folder `proto` from the `.proto` files in `tollgate-server/proto`; see
//! `tools/proto`. The modules here only nest the packages the way the generated code refers to them.
#![allow(dead_code, missing_docs, unreachable_pub)]

/// The descriptors of all files, for reflection.
pub(crate) const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

pub(crate) mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                include!("proto/envoy.config.core.v3.rs");
            }
        }
    }

    pub mod extensions {
        pub mod common {
            pub mod ratelimit {
                pub mod v3 {
                    include!("proto/envoy.extensions.common.ratelimit.v3.rs");
                }
            }
        }
    }

    pub mod service {
        pub mod discovery {
            pub mod v3 {
                include!("proto/envoy.service.discovery.v3.rs");
            }
        }

        pub mod ratelimit {
            pub mod v3 {
                include!("proto/envoy.service.ratelimit.v3.rs");
            }
        }
    }

    pub mod r#type {
        pub mod v3 {
            include!("proto/envoy.r#type.v3.rs");
        }
    }
}

pub(crate) mod google {
    pub mod rpc {
        include!("proto/google.rpc.rs");
    }
}

pub(crate) mod ratelimit {
    pub mod config {
        pub mod ratelimit {
            pub mod v3 {
                include!("proto/ratelimit.config.ratelimit.v3.rs");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use sha2::{Digest, Sha256};

    include!("proto/digests.rs");

    #[test]
    fn generated_files_belong_to_the_protos() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let generated = package.join("src/service/proto");
        let descriptors = fs::read(generated.join("descriptors.bin")).expect("read");
        let mut code = files_under(&generated, "rs");
        code.retain(|path| !path.ends_with("digests.rs"));
        let found = [
            sha256_of_files(&package.join("proto"), &files_under(&package.join("proto"), "proto")),
            format!("{:x}", Sha256::digest(&descriptors)),
            sha256_of_files(&generated, &code),
        ];
        assert_eq!(found, [PROTO_SHA256, DESCRIPTORS_SHA256, CODE_SHA256], "run `make proto` and commit the result");
    }

    fn files_under(directory: &Path, extension: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                files.extend(files_under(&path, extension));
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
        files.sort();
        files
    }

    /// As in `tools/proto`.
    fn sha256_of_files(root: &Path, files: &[PathBuf]) -> String {
        let mut digest = Sha256::new();
        for path in files {
            digest.update(path.strip_prefix(root).expect("under the root").to_string_lossy().as_bytes());
            digest.update([0]);
            digest.update(fs::read(path).expect("read"));
            digest.update([0]);
        }
        format!("{:x}", digest.finalize())
    }
}
