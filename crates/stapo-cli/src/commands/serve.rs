//! `stapo serve`: run folders in the browser, live. The server reads and never writes; training processes do not know of
//! it.

mod access;
mod api;
mod assets;
mod compare;
mod decimate;
mod evaluations;
mod http;
mod index;
mod lines;
mod question;
mod responses;
mod sampled;
mod samples;
mod site;
mod status;
mod stream;

use access::{Access, Token};
use anyhow::{Context, Result, bail};
use http::{Refusal, Request, Response};
use site::Site;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Serves a page that shows runs while they train: curves, responses, tokens, comparisons.
#[derive(clap::Args)]
pub struct Args {
    /// The folder that holds the runs; a run or an experiment itself is fine too.
    #[arg(default_value = "runs")]
    folder: PathBuf,

    /// The port; 0 takes any that is free. By default 7860 or, if that is taken, one of the next ten.
    #[arg(long, value_name = "N")]
    port: Option<u16>,

    /// The address to listen on, for other machines.
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    listen: IpAddr,

    /// Answers without the token that the printed address holds: every user of this machine can then read the runs.
    #[arg(long)]
    no_token: bool,

    /// Opens the page in the browser.
    #[arg(long)]
    open: bool,
}

const PORT: u16 = 7860;
/// Connections at a time; a browser has six per page at most.
const MAX_CONNECTIONS: usize = 256;
const STACK_BYTES: usize = 512 << 10;

pub fn run(args: &Args) -> Result<ExitCode> {
    if !args.folder.is_dir() {
        bail!(
            "folder {}: no such folder\nhint: name the folder that holds your runs, as in `stapo serve runs`",
            args.folder.display()
        );
    }
    let host = host_name();
    let listener = bind(args.listen, args.port)?;
    let bound = listener.local_addr().context("the address of the server")?;
    let token = if args.no_token { Token::Dropped } else { Token::Demanded };
    let access = Access::new(bound, host.clone(), token)?;
    let site = Site::new(&args.folder, host);
    site.refresh(index::Look::Everything);
    let shown = if args.listen.is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { args.listen };
    let address = |token: Option<&str>| {
        let token = token.map_or(String::new(), |token| format!("?token={token}"));
        format!("http://{}/{token}", SocketAddr::new(shown, bound.port()))
    };
    println!("{} runs of {}: {}", site.index().rows().len(), args.folder.display(), address(access.token()));
    match access.token() {
        Some(_) if args.listen.is_loopback() => {
            println!("this address holds a token, without which other users of this machine read nothing");
        }
        Some(_) => println!(
            "this address holds the token: whoever has it can read the runs, over a connection without encryption"
        ),
        None => println!("no token: every user of this machine can read the runs"),
    }
    println!("Ctrl-C ends the server; runs continue without it");
    if args.open {
        open_browser(&address(access.token_for_once()?.as_deref()));
    }
    let shared = Arc::new(Server { site, access });
    let watched = Arc::clone(&shared);
    spawn("watch", move || watched.site.watch())?;
    accept(&listener, &shared);
    Ok(ExitCode::SUCCESS)
}

struct Server {
    site: Site,
    access: Access,
}

fn bind(address: IpAddr, port: Option<u16>) -> Result<TcpListener> {
    let ports = port.map_or(PORT..=PORT + 10, |port| port..=port);
    let mut last = None;
    for port in ports.clone() {
        match TcpListener::bind((address, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    let error = last.map_or(String::new(), |error| error.to_string());
    bail!(
        "{address}, port {}: {error}\nhint: --port 0 takes any free port",
        if port.is_some() {
            ports.start().to_string()
        } else {
            format!("{} to {}", ports.start(), ports.end())
        }
    )
}

/// Serves each connection on a separate thread, up to a bound.
fn accept(listener: &TcpListener, server: &Arc<Server>) {
    let n_open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else {
            // Without a file descriptor the next one fails as well, at once, until a connection is closed.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let open = Open::count(&n_open);
        if n_open.load(Ordering::SeqCst) > MAX_CONNECTIONS {
            let refusal = Refusal::new(503, "too many connections at a time");
            let _ = Response::refusal(&refusal).write(&mut stream, false);
            continue;
        }
        let server = Arc::clone(server);
        // Without a thread the connection is closed, and the page tries again.
        let _ = spawn("connection", move || {
            let _open = open;
            serve(&server, &mut stream);
        });
    }
}

/// A connection, counted for as long as the value lives.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn count(n_open: &Arc<AtomicUsize>) -> Self {
        n_open.fetch_add(1, Ordering::SeqCst);
        Open(Arc::clone(n_open))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let builder = std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    builder.spawn(run).map(drop).context("a thread of the server")
}

/// Answers the one request of a connection. A page that left in the meantime is no error.
fn serve(server: &Server, stream: &mut TcpStream) {
    let request = match Request::read(stream) {
        Ok(None) => return,
        Ok(Some(request)) => request,
        Err(refusal) => {
            let _ = Response::refusal(&refusal).write(stream, false);
            return;
        }
    };
    let response = match server.access.check(&request) {
        Ok(Some(response)) => Ok(response),
        Ok(None) if request.path == "/stream" && !request.is_head => {
            stream::serve(&server.site, &request, stream);
            return;
        }
        Ok(None) => answer(&server.site, &request),
        Err(refusal) => Err(refusal),
    };
    let response = response.unwrap_or_else(|refusal| Response::refusal(&refusal));
    let _ = response.write(stream, request.is_head);
}

fn answer(site: &Site, request: &Request) -> Result<Response, Refusal> {
    match assets::find(&request.path) {
        Some(response) => Ok(response),
        None => api::answer(site, request),
    }
}

/// Starts the browser of the desktop; without one the printed address is enough.
fn open_browser(address: &str) {
    let program = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let started = Command::new(program)
        .arg(address)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    if let Err(error) = started {
        eprintln!("warning: --open: {program} could not be started ({error}); open the address above");
    }
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this host".to_string())
}
