//! What a person types, and what they read when it cannot be done.

use std::fmt;
use std::io::{self, Write};
use std::net::{AddrParseError, SocketAddr};

use clap::{Parser, Subcommand};
use tokio::net::TcpListener;
use tollgate::{InvalidLimit, Limiter};

use crate::{builtin, service, shutdown};

/// Exact, fast and bounded rate limiting.
#[derive(Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answers rate limit questions over HTTP, at POST /v1/check
    Serve {
        /// The address and port to listen on; port 0 takes any free one
        #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8090", value_parser = socket_address)]
        listen: SocketAddr,
    },
}

/// Does what the command line asks; for `serve`, until a signal ends it.
pub(crate) fn run(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Serve { listen } => tokio::runtime::Runtime::new().map_err(Error::Runtime)?.block_on(serve(listen)),
    }
}

async fn serve(address: SocketAddr) -> Result<(), Error> {
    let limiter = Limiter::new(builtin::limit().map_err(Error::Limit)?);
    let cannot_listen = |source| Error::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(cannot_listen)?;
    let bound = listener.local_addr().map_err(cannot_listen)?;
    // Before the line below is read, so that whoever reads it can already stop the server with a signal.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    announce(bound);
    service::http::run(listener, limiter, shutdown).await;
    Ok(())
}

/// Says what listens where, and what is in force. A closed stdout is no reason not to serve.
fn announce(address: SocketAddr) {
    let _ = writeln!(
        io::stdout(),
        "tollgate {} answers POST http://{address}/v1/check; {}",
        env!("CARGO_PKG_VERSION"),
        builtin::DESCRIPTION,
    );
}

fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|error: AddrParseError| format!("{error}; use ADDRESS:PORT, such as 127.0.0.1:8090"))
}

/// Why a command could not be done, with the fix.
#[derive(Debug)]
pub(crate) enum Error {
    Limit(InvalidLimit),
    Listen { address: SocketAddr, source: io::Error },
    Runtime(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(error) => write!(out, "{error}"),
            Self::Listen { address, source } => {
                let fix = match source.kind() {
                    io::ErrorKind::AddrInUse => "stop the process that has it, or choose another port with --listen",
                    io::ErrorKind::AddrNotAvailable => "use an address of this machine with --listen",
                    io::ErrorKind::PermissionDenied => "choose a port above 1023 with --listen",
                    _ => "choose another address with --listen",
                };
                write!(out, "cannot listen on {address}: {source}; {fix}")
            }
            Self::Runtime(source) => {
                write!(out, "cannot start: {source}; give the process more threads or file descriptors")
            }
        }
    }
}
