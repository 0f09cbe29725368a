//! The files of envoyproxy/ratelimit that a rule file names.
//!
//! `service.envoy.files` has paths of files, folders, and patterns with `*` in the last part, such as
//! `ratelimit/*.yaml`. They start from the folder of the rule file.

use std::path::{Path, PathBuf};

use tollgate_config::internal::{DomainConfig, SettingError};
use tollgate_config::{Parsed, Problems};
use tollgate_rules::internal::envoy::matches_wildcard;

/// More files than people keep, each with a domain.
const MAX_FILES: usize = 1000;

/// The most bytes of all files together.
const MAX_BYTES: usize = 64 << 20;

/// The suffixes of files that are read from a folder.
const SUFFIXES: [&str; 2] = [".yaml", ".yml"];

/// Reads the files that a rule file names, and adds their limits to its own.
pub(super) fn load(file: Parsed) -> Result<Parsed, Problems> {
    let (paths, mut problems) = find(&file);
    if paths.is_empty() && problems.is_none() {
        return Ok(file);
    }
    let (mut domains, mut bytes, mut warnings) = (Vec::new(), 0, None);
    for path in paths {
        let text = match super::read(&path) {
            Ok(text) => text,
            Err(error) => {
                let problem = format!("cannot read {}: {error}", path.display());
                add(&mut problems, refuse(&file, &problem, "check the path and its permissions"));
                continue;
            }
        };
        bytes += text.len();
        if bytes > MAX_BYTES {
            add(&mut problems, refuse(&file, "the files have more than 64 MiB", "use fewer files"));
            break;
        }
        match DomainConfig::parse(&path.display().to_string(), &text) {
            Ok((domain, found)) => {
                domains.push(domain);
                add(&mut warnings, found);
            }
            Err(found) => add(&mut problems, found),
        }
    }
    // Problems of some files do not hide those of others.
    match (file.with_domains(domains), problems, warnings) {
        (Ok(file), None, None) => Ok(file),
        (Ok(file), None, Some(warnings)) => Ok(file.with_warnings(warnings)),
        (Ok(_), Some(problems), _) | (Err(problems), None, _) => Err(problems),
        (Err(one), Some(other), _) => Err(one.and(other)),
    }
}

fn add(all: &mut Option<Problems>, more: Problems) {
    *all = Some(match all.take() {
        Some(all) => all.and(more),
        None => more,
    });
}

/// Returns the paths whose folders change if files are added, removed or replaced.
pub(super) fn watched(file: &Parsed) -> impl Iterator<Item = PathBuf> {
    patterns(file).map(|path| if path.is_dir() { path.join("*") } else { path })
}

/// Returns the files in the order of their names, and the problems of paths without a file.
pub(super) fn find(file: &Parsed) -> (Vec<PathBuf>, Option<Problems>) {
    let (mut found, mut problems) = (Vec::new(), None);
    for pattern in patterns(file) {
        match expand(&pattern) {
            Ok(expanded) if expanded.is_empty() => {
                let problem = format!("no file matches {}", pattern.display());
                let fix = "check the path, which starts from the folder of the rule file";
                add(&mut problems, refuse(file, &problem, fix));
            }
            Ok(expanded) => found.extend(expanded),
            Err(error) => {
                let problem = format!("cannot read {}: {error}", pattern.display());
                add(&mut problems, refuse(file, &problem, "check the path and its permissions"));
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    if found.len() > MAX_FILES {
        let problem = format!("the files are more than {MAX_FILES}");
        add(&mut problems, refuse(file, &problem, "put several descriptors into one file"));
        found.truncate(MAX_FILES);
    }
    (found, problems)
}

fn patterns(file: &Parsed) -> impl Iterator<Item = PathBuf> {
    let files = file.service.envoy.as_ref().and_then(|envoy| envoy.files.as_ref());
    files.into_iter().flatten().map(|path| file.folder().join(path))
}

fn refuse(file: &Parsed, problem: &str, fix: &str) -> Problems {
    let error = SettingError::new(format!("service.envoy.files: {problem}"), fix);
    file.problems([error.of("envoy").of("service")])
}

fn expand(pattern: &Path) -> std::io::Result<Vec<PathBuf>> {
    if pattern.is_dir() {
        return in_folder(pattern, |name| SUFFIXES.iter().any(|suffix| name.ends_with(suffix)));
    }
    let name = pattern.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !name.contains('*') {
        return Ok(vec![pattern.to_owned()]);
    }
    let parts: Vec<&str> = name.split('*').collect();
    in_folder(pattern.parent().unwrap_or(Path::new("")), |name| matches_wildcard(&parts, name))
}

/// Returns the files in a folder. Hidden ones are left out, as in a shell.
fn in_folder(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in std::fs::read_dir(here)? {
        let name = entry?.file_name();
        let wanted = name.to_str().is_some_and(|name| !name.starts_with('.') && is_wanted(name));
        // A link counts as the file that it leads to.
        if wanted && folder.join(&name).is_file() {
            found.push(folder.join(&name));
            // One more than the bound is enough to exceed it.
            if found.len() > MAX_FILES {
                break;
            }
        }
    }
    Ok(found)
}
