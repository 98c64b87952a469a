//! What `stapo serve` says at its start, whom it answers, and what it refuses.

use crate::common::complaint;
use crate::serve::{Server, invented};
use std::io::{BufRead, BufReader, Write};

#[test]
fn foreign_names_pages_methods_and_giants_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    invented(&folder.path().join("a"), 3);
    let server = Server::start(folder.path(), &["--no-token"]);
    let (status, head, body) = server.ask_bare("/", "");
    assert_eq!(status, 200);
    assert!(
        head.contains("default-src 'none'; script-src 'self'") && head.contains("frame-ancestors 'none'"),
        "{head}"
    );
    assert!(!body.contains("<script>") && !body.contains(" style="), "inline code would be blocked: {body}");
    assert!(
        server.said.starts_with("1 runs of ") && server.said.contains("\nno token: every user"),
        "{}",
        server.said
    );
    assert!(server.said.ends_with("\nCtrl-C ends the server; runs continue without it\n"), "{}", server.said);
    let send = |request: &str| server.send(request).0;
    assert_eq!(send("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), 403);
    assert_eq!(send("GET / HTTP/1.1\r\n\r\n"), 403);
    assert_eq!(server.ask("/api/runs", "Origin: http://evil.example\r\n").0, 403);
    assert_eq!(send(&format!("POST /api/runs HTTP/1.1\r\nHost: {}\r\n\r\n", server.address)), 405);
    assert_eq!(send(&format!("DELETE / HTTP/1.1\r\nHost: {}\r\n\r\n", server.address)), 405);
    assert_eq!(send("nonsense\r\n\r\n"), 400);
    assert_eq!(server.ask("/", &format!("X: {}\r\n", "x".repeat(40_000))).0, 431);
    assert_eq!(server.ask(&format!("/api/series?{}", "run=a&".repeat(300)), "").0, 400);
    assert_eq!(server.ask("/api/series?run=a&key=loss&points=many", "").0, 400);
    let (status, head, body) = server.send(&format!("HEAD / HTTP/1.1\r\nHost: {}\r\n\r\n", server.address));
    assert!(status == 200 && body.is_empty() && head.contains("Content-Length: "), "{head}");
    // A page that listens is told of a run that is new.
    let mut page = BufReader::new(server.connect());
    let request = format!("GET /stream HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    page.get_mut().write_all(request.as_bytes()).unwrap();
    let mut told = page.lines().map(Result::unwrap).filter(|line| line.starts_with("data: "));
    assert!(told.next().unwrap().contains("\"id\":\"a\""));
    invented(&folder.path().join("later"), 3);
    assert!(told.next().unwrap().contains("\"id\":\"later\""));
    assert!(complaint(folder.path(), &["serve", "nowhere"]).contains("no such folder"));
    let port = server.address.rsplit(':').next().unwrap();
    let said = complaint(folder.path(), &["serve", ".", "--port", port]);
    assert!(said.contains(port) && said.contains("hint: --port 0"), "{said}");
}

#[test]
fn other_users_and_other_machines_need_the_token() {
    let folder = tempfile::tempdir().unwrap();
    invented(&folder.path().join("a"), 3);
    for (listen, warning) in [
        ("127.0.0.1", "this address holds a token, without which other users of this machine read nothing"),
        ("0.0.0.0", "whoever has it can read the runs, over a connection without encryption"),
    ] {
        let server = Server::start(folder.path(), &["--listen", listen]);
        assert_eq!(server.token.len(), 32);
        assert!(
            server.said.contains(warning) && server.said.contains(": http://127.0.0.1:"),
            "{}",
            server.said
        );
        for target in ["/", "/api/runs", "/stream", "/?token=wrong"] {
            let (status, _, body) = server.ask_bare(target, "");
            assert!(status == 401 && !body.contains("long"), "{target}: {status} {body}");
        }
        assert_eq!(server.ask_bare("/api/runs", "Cookie: stapo_token=wrong\r\n").0, 401);
        let (status, head, _) = server.ask_bare(&format!("/?token={}", server.token), "");
        assert!(status == 303 && head.contains("SameSite=Strict") && head.contains("HttpOnly"), "{head}");
        let cookie = head.split("Set-Cookie: ").nth(1).unwrap().split(';').next().unwrap();
        assert_eq!(server.ask_bare("/api/runs", &format!("Cookie: {cookie}\r\n")).0, 200);
    }
    let refused =
        complaint(folder.path(), &["serve", ".", "--port", "0", "--listen", "0.0.0.0", "--no-token"]);
    assert!(refused.contains("can be reached from other machines"), "{refused}");
}
