//! A headless Chromium that is steered over a pipe by the Chrome DevTools Protocol: pages that live, telephones, console
//! messages and requests.

use super::chromium;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub struct Session {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    next_id: u64,
    /// The id of the page's session in the protocol.
    page: String,
    /// Errors, warnings and console messages of the page.
    pub problems: Vec<String>,
    /// The addresses of all requests.
    pub requests: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Session {
    /// Starts a browser. Returns `None`, and prints the reason, on machines without one.
    pub fn start() -> Option<Self> {
        let Some(chromium) = chromium() else {
            let _ =
                writeln!(std::io::stderr(), "skipped, page not opened: no chromium on PATH and no $CHROMIUM");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        // The protocol's pipe is descriptors 3 and 4; the shell makes them of standard input and output.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(chromium)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .args(["--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = listen(child.stdout.take().unwrap());
        let mut session = Self {
            child,
            to,
            from,
            next_id: 0,
            page: String::new(),
            problems: Vec::new(),
            requests: Vec::new(),
            _profile: profile,
        };
        let target = session.call("Target.createTarget", &json!({"url": "about:blank"}))["targetId"].clone();
        let attached = session.call("Target.attachToTarget", &json!({"targetId": target, "flatten": true}));
        session.page = attached["sessionId"].as_str().unwrap().to_string();
        for domain in ["Runtime", "Log", "Network", "Page"] {
            session.call(&format!("{domain}.enable"), &json!({}));
        }
        Some(session)
    }

    /// The size of the window; below 600 pixels it is a telephone with touch.
    pub fn resize(&mut self, width: u32, height: u32) {
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", &metrics);
    }

    pub fn theme(&mut self, theme: &str) {
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.call("Emulation.setEmulatedMedia", &media);
    }

    pub fn open(&mut self, address: &str) {
        let opened = self.call("Page.navigate", &json!({"url": address}));
        assert!(opened["errorText"].is_null(), "{address}: {opened}");
    }

    /// The value of an expression in the page; a promise is awaited.
    pub fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", &asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until the expression is true in the page, and returns how long that took.
    pub fn until(&mut self, expression: &str) -> Duration {
        let began = Instant::now();
        while self.value(&format!("Boolean({expression})")) != json!(true) {
            let seen = "document.body ? document.body.innerText.slice(0, 1500) : ''";
            assert!(began.elapsed() < PATIENCE, "never true: {expression}\n{}", self.value(seen));
            std::thread::sleep(Duration::from_millis(50));
        }
        began.elapsed()
    }

    /// Presses, moves and releases the mouse.
    pub fn mouse(&mut self, kind: &str, x: f64, y: f64) {
        let event = json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1});
        self.call("Input.dispatchMouseEvent", &event);
    }

    /// Puts fingers on the page, moves them or lifts all of them.
    pub fn touch(&mut self, kind: &str, fingers: &[(f64, f64)]) {
        let places = fingers.iter().enumerate().map(|(id, (x, y))| json!({"x": x, "y": y, "id": id}));
        let event = json!({"type": kind, "touchPoints": places.collect::<Vec<_>>()});
        self.call("Input.dispatchTouchEvent", &event);
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.page.is_empty() {
            message["sessionId"] = json!(self.page);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        self.to.flush().unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = match self.from.recv_timeout(left) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => panic!("{method}: the browser did not answer"),
                Err(RecvTimeoutError::Disconnected) => panic!("{method}: the browser left"),
            };
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    /// Keeps what the page said and asked for.
    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" => self.problems.push(params.to_string()),
            "Log.entryAdded" => self.problems.push(params["entry"].to_string()),
            "Network.requestWillBeSent" => {
                self.requests.push(params["request"]["url"].as_str().unwrap_or_default().to_string());
            }
            _ => {}
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The messages of the browser, each of which ends in a zero byte.
fn listen(from: ChildStdout) -> Receiver<Value> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut bytes = Vec::new();
        while reader.read_until(0, &mut bytes).is_ok_and(|n| n > 0) {
            bytes.pop();
            let Ok(message) = serde_json::from_slice(&bytes) else { return };
            if send.send(message).is_err() {
                return;
            }
            bytes.clear();
        }
    });
    receive
}
