//! Opens a page in headless Chromium and evaluates a script in it.

pub mod charts;
pub mod runs;
pub mod session;

use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The Chromium to use: `$CHROMIUM`, else the first of the usual names on the PATH.
pub fn chromium() -> Option<PathBuf> {
    let named = std::env::var_os("CHROMIUM").map(PathBuf::from);
    let usual = ["chromium", "chromium-browser", "google-chrome"];
    let folders: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let on_path = usual.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    named.into_iter().chain(on_path).find(|path| path.is_file())
}

/// Collects errors and warnings of the page from its first line on.
const WATCH: &str = "<script>window.problems=[];\
    addEventListener('error',e=>problems.push(String(e.message)));\
    addEventListener('unhandledrejection',e=>problems.push(String(e.reason)));\
    addEventListener('securitypolicyviolation',e=>problems.push('blocked '+e.blockedURI));\
    console.error=(...a)=>problems.push(a.join(' '));console.warn=console.error;</script>";

/// Opens a copy of `page` from a file, evaluates the expression `probe` in the page, and returns its value. Fails on
/// any error or warning of the page. Returns `None`, and prints the reason, on machines without a browser.
pub fn probe(page: &Path, width: u32, probe: &str) -> Option<Value> {
    let Some(chromium) = chromium() else {
        // Written to standard error directly, which the test harness does not capture: a skipped test must be visible.
        let _ = writeln!(std::io::stderr(), "skipped, page not opened: no chromium on PATH and no $CHROMIUM");
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("<title>") && html.contains("</body>"));
    let probed = format!(
        "<script>top.document.title=JSON.stringify({{found:({probe}),problems:window.problems}})</script></body>"
    );
    let (start, end) = html.rsplit_once("</body>").unwrap();
    let watched = format!("{}{probed}{end}", start.replacen("<title>", &format!("{WATCH}<title>"), 1));
    let copy = folder.path().join("page.html");
    std::fs::write(&copy, if width < MIN_WINDOW { framed(&watched, width) } else { watched }).unwrap();
    let (dom, log) = dump_dom(&chromium, &copy, folder.path(), width);
    let console: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(console.is_empty(), "console: {console:?}");
    let title = dom.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).unwrap().0;
    let json = title.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&");
    let answer: Value = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{e}: {json}\n{log}"));
    assert_eq!(answer["problems"], serde_json::json!([]), "{answer}");
    Some(answer["found"].clone())
}

/// Chromium opens no narrower window; a telephone is tested as a frame of its width.
const MIN_WINDOW: u32 = 500;

fn framed(html: &str, width: u32) -> String {
    let quoted = html.replace('&', "&amp;").replace('"', "&quot;");
    format!(
        "<!doctype html><title></title><iframe style=\"border:0;width:{width}px;height:900px\" srcdoc=\"{quoted}\"></iframe>"
    )
}

/// The document after its scripts have run, and the browser's log.
fn dump_dom(chromium: &Path, page: &Path, folder: &Path, width: u32) -> (String, String) {
    let mut child = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--disable-dev-shm-usage", "--enable-logging=stderr", "--hide-scrollbars", "--dump-dom"])
        .arg(format!("--window-size={width},900"))
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut err = child.stderr.take().unwrap();
    let dom = std::thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let log = std::thread::spawn(move || {
        let mut text = Vec::new();
        err.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the browser did not come back");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    (dom.join().unwrap(), log.join().unwrap())
}
