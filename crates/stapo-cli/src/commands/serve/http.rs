//! The part of HTTP/1.1 that a page of this server needs: one request without a body per connection, one response.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Bytes of a request line with all headers.
const MAX_HEAD: usize = 16 << 10;
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// Nothing but the page's own files and answers: no inline script or style, no frame around the page, no form.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A request whose syntax and size are right.
#[derive(Debug, Default)]
pub struct Request {
    pub is_head: bool,
    /// The path, percent-decoded.
    pub path: String,
    /// Names and values of the query in order, percent-decoded.
    pub query: Vec<(String, String)>,
    /// By name in lower case.
    headers: BTreeMap<String, String>,
}

/// The status of a refused request, and the reason for a person.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    pub reason: String,
}

impl Refusal {
    pub fn new(status: u16, reason: impl Into<String>) -> Self {
        Self { status, reason: reason.into() }
    }
}

impl Request {
    /// Reads a request. `None` for a connection that was closed without one.
    pub fn read(stream: &mut TcpStream) -> Result<Option<Self>, Refusal> {
        let timed = stream.set_read_timeout(Some(READ_TIMEOUT));
        timed.and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT))).map_err(|e| broken(&e))?;
        let began = Instant::now();
        let mut head = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let n = match stream.read(&mut buffer) {
                Ok(0) if head.is_empty() => return Ok(None),
                Ok(0) => return Err(Refusal::new(400, "the request ends before its headers do")),
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(&error)),
            };
            // The end of the headers may lie across two reads.
            let from = head.len().saturating_sub(3);
            head.extend_from_slice(&buffer[..n]);
            if let Some(end) = head[from..].windows(4).position(|four| four == b"\r\n\r\n") {
                head.truncate(from + end);
                break;
            }
            if began.elapsed() > READ_TIMEOUT {
                return Err(Refusal::new(408, "the request came too slowly"));
            }
            if head.len() > MAX_HEAD {
                return Err(Refusal::new(431, format!("request headers of more than {MAX_HEAD} bytes")));
            }
        }
        Self::parse(&head).map(Some)
    }

    fn parse(head: &[u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(head).map_err(|_| Refusal::new(400, "headers that are not UTF-8"))?;
        let mut lines = text.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        let (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0"), None) =
            (method, target, version, words.next())
        else {
            return Err(Refusal::new(400, "no HTTP/1.1 request"));
        };
        if !matches!(method, "GET" | "HEAD") {
            return Err(Refusal::new(405, "this server only reads: GET and HEAD"));
        }
        let mut headers = BTreeMap::new();
        for line in lines {
            let Some((name, value)) = line.split_once(':') else {
                return Err(Refusal::new(400, "a header without a colon"));
            };
            if headers.insert(name.to_ascii_lowercase(), value.trim().to_string()).is_some()
                && name.eq_ignore_ascii_case("host")
            {
                return Err(Refusal::new(400, "two Host headers"));
            }
        }
        if headers.contains_key("transfer-encoding")
            || headers.get("content-length").is_some_and(|n| n != "0")
        {
            return Err(Refusal::new(413, "a request with a body"));
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if !path.starts_with('/') {
            return Err(Refusal::new(400, "a target that is no path"));
        }
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            Ok((decoded(&name.replace('+', " "))?, decoded(&value.replace('+', " "))?))
        };
        let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect::<Result<_, _>>()?;
        Ok(Self { is_head: method == "HEAD", path: decoded(path)?, query, headers })
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The first value of a name in the query.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// All values of a name in the query.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.query.iter().filter(move |(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The value of a cookie.
    pub fn cookie(&self, name: &str) -> Option<&str> {
        let pairs = self.header("cookie")?.split(';').filter_map(|pair| pair.trim().split_once('='));
        pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }
}

fn broken(error: &std::io::Error) -> Refusal {
    Refusal::new(408, format!("the request did not come: {error}"))
}

/// Percent-decoding into UTF-8.
fn decoded(text: &str) -> Result<String, Refusal> {
    let bad = || Refusal::new(400, "a target with bad percent-encoding");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).and_then(|two| std::str::from_utf8(two).ok()).ok_or_else(bad)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| bad())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// A whole response.
pub struct Response {
    pub status: u16,
    pub kind: &'static str,
    pub body: Vec<u8>,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
}

impl Response {
    pub fn new(kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, kind, body: body.into(), headers: Vec::new() }
    }

    pub fn json(value: &impl serde::Serialize) -> Self {
        Self::new("application/json", serde_json::to_vec(value).unwrap_or_else(|_| b"null".to_vec()))
    }

    pub fn refusal(refusal: &Refusal) -> Self {
        let body = format!("{}\n", refusal.reason);
        let mut response = Self::new("text/plain; charset=utf-8", body);
        response.status = refusal.status;
        if refusal.status == 405 {
            response.headers.push(("Allow", "GET, HEAD".into()));
        }
        response
    }

    pub fn write(&self, stream: &mut TcpStream, is_head: bool) -> std::io::Result<()> {
        // Writing to a string cannot fail.
        let mut head = head(self.status, self.kind);
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let _ = write!(head, "Content-Length: {}\r\n\r\n", self.body.len());
        let mut bytes = head.into_bytes();
        if !is_head {
            bytes.extend_from_slice(&self.body);
        }
        stream.write_all(&bytes)?;
        stream.flush()
    }
}

/// The status line and the headers that every response has, without the empty line that ends them.
pub fn head(status: u16, kind: &str) -> String {
    let reason = match status {
        200 => "OK",
        303 => "See Other",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    };
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Security-Policy: {POLICY}\r\n\
         X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n\
         Cross-Origin-Opener-Policy: same-origin\r\nCache-Control: no-store\r\nConnection: close\r\n"
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The request of a head that is right.
    pub fn request(head: &str) -> Request {
        Request::parse(head.as_bytes()).unwrap()
    }

    fn status(head: &str) -> u16 {
        Request::parse(head.as_bytes()).map_or_else(|refusal| refusal.status, |_| 200)
    }

    #[test]
    fn a_request_is_decoded_once() {
        let request =
            Request::parse(b"GET /api/run?run=a%2Fb+c&x=%2525&x=2 HTTP/1.1\r\nHost: h\r\nCookie: a=1; b=2")
                .unwrap();
        assert_eq!((request.path.as_str(), request.value("run")), ("/api/run", Some("a/b c")));
        assert_eq!(request.values("x").collect::<Vec<_>>(), ["%25", "2"]);
        assert_eq!(
            (request.header("host"), request.cookie("b"), request.cookie("c")),
            (Some("h"), Some("2"), None)
        );
    }

    #[test]
    fn what_is_no_plain_get_is_refused() {
        let cases = [
            ("POST / HTTP/1.1", 405),
            ("GET / HTTP/2", 400),
            ("GET http://a/ HTTP/1.1", 400),
            ("GET /%zz HTTP/1.1", 400),
            ("GET /%ff HTTP/1.1", 400),
            ("GET /%2 HTTP/1.1", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nhost: b", 400),
            ("GET / HTTP/1.1\r\nnonsense", 400),
            ("GET / HTTP/1.1\r\nContent-Length: 5", 413),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked", 413),
            ("HEAD / HTTP/1.1\r\nContent-Length: 0", 200),
        ];
        for (head, expected) in cases {
            assert_eq!(status(head), expected, "{head}");
        }
    }

    /// No guessed type, no address of ours in another page's log, no other page or window that holds the answer, no copy.
    #[test]
    fn every_answer_keeps_to_its_page() {
        let head = head(200, "text/plain");
        for line in [
            "HTTP/1.1 200 OK",
            "Content-Type: text/plain",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            "Cross-Origin-Opener-Policy: same-origin",
            "Cache-Control: no-store",
            "Connection: close",
        ] {
            assert!(head.split("\r\n").any(|own| own == line), "{line} is not in {head}");
        }
        let policy =
            head.split("\r\n").find_map(|line| line.strip_prefix("Content-Security-Policy: ")).unwrap();
        let policy: Vec<&str> = policy.split("; ").map(str::trim).collect();
        for rule in ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
        {
            assert!(policy.contains(&rule), "{rule} is not in {policy:?}");
        }
    }

    /// The words of RFC 9110 and RFC 6585.
    #[test]
    fn a_refusal_has_its_status_and_its_reason() {
        let phrases = [
            (303, "See Other"),
            (400, "Bad Request"),
            (401, "Unauthorized"),
            (403, "Forbidden"),
            (404, "Not Found"),
            (405, "Method Not Allowed"),
            (408, "Request Timeout"),
            (413, "Content Too Large"),
            (431, "Request Header Fields Too Large"),
            (503, "Service Unavailable"),
        ];
        for (status, phrase) in phrases {
            assert!(head(status, "").starts_with(&format!("HTTP/1.1 {status} {phrase}\r\n")));
            let response = Response::refusal(&Refusal::new(status, "why"));
            assert_eq!((response.status, response.body), (status, b"why\n".to_vec()));
            let allows = [("Allow", "GET, HEAD".to_string())];
            assert_eq!(response.headers, allows[..usize::from(status == 405)]);
        }
    }
}
