//! A Redis server for one test.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A Redis server that ends with the test.
pub struct Redis {
    server: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Redis {
    pub fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let dir = tempfile::tempdir().expect("a directory");
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let server = Command::new(program)
            .args(["--port", &port.to_string(), "--save", "", "--dir"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts: tools/install-redis installs it");
        let mut redis = Self { server, port, _dir: dir };
        redis.wait();
        redis
    }
}

impl Redis {
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    #[expect(clippy::disallowed_methods, reason = "a real server takes real time to start")]
    fn wait(&mut self) {
        for _ in 0..1000 {
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("redis-server did not come up");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
