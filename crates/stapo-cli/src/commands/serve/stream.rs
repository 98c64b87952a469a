//! Server-sent events: the server tells a page which runs changed, and the page asks for what it shows of them.

use super::http::{Request, head};
use super::site::Site;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

/// A line that says nothing, so that a connection that broke is found.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Sends the changes after the version in `since` until the page leaves.
pub fn serve(site: &Site, request: &Request, stream: &mut TcpStream) {
    let resumed = request.header("last-event-id").and_then(|id| id.parse().ok());
    let mut since: u64 = resumed.or_else(|| request.value("since")?.parse().ok()).unwrap_or(0);
    let _listener = site.listen();
    let mut text = head(200, "text/event-stream") + "\r\nretry: 1000\n\n";
    while stream.write_all(text.as_bytes()).and_then(|()| stream.flush()).is_ok() {
        let news = site.wait(since, HEARTBEAT);
        text = if news.rows.is_empty() && news.gone.is_empty() {
            ": \n\n".to_string()
        } else {
            let Ok(json) = serde_json::to_string(&news) else { return };
            format!("id: {}\nevent: runs\ndata: {json}\n\n", news.version)
        };
        since = news.version;
    }
}

#[cfg(test)]
mod tests {
    use super::super::http::tests::request;
    use super::super::index::Look;
    use super::*;
    use serde_json::Value;
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::sync::Arc;

    /// The number and the runs of the first event that a page with this request gets.
    fn first_event(site: &Arc<Site>, head: &str) -> (String, Vec<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let page = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let (site, request) = (Arc::clone(site), request(head));
        // The thread ends with its heartbeat, which finds that the page has left.
        std::thread::spawn(move || serve(&site, &request, &mut stream));
        let mut lines = BufReader::new(page).lines().map(Result::unwrap);
        assert_eq!(lines.next().unwrap(), "HTTP/1.1 200 OK");
        let number = lines.find_map(|line| line.strip_prefix("id: ").map(String::from)).unwrap();
        assert_eq!(lines.next().unwrap(), "event: runs");
        let news: Value =
            serde_json::from_str(lines.next().unwrap().strip_prefix("data: ").unwrap()).unwrap();
        let rows = news["rows"].as_array().unwrap().iter();
        (number, rows.map(|row| row["id"].as_str().unwrap().to_string()).collect())
    }

    /// A browser that connects again sends the number of the last event that it saw, and its old address.
    #[test]
    fn a_page_goes_on_after_the_last_event_that_it_saw() {
        let folder = tempfile::tempdir().unwrap();
        let site = Arc::new(Site::new(folder.path(), "here".into()));
        let mut versions = Vec::new();
        for run in ["a", "b"] {
            fs::create_dir(folder.path().join(run)).unwrap();
            fs::write(folder.path().join(run).join("plan.toml"), "steps = 1\n").unwrap();
            site.refresh(Look::Everything);
            versions.push(site.news(0).version);
        }
        let last = versions[1].to_string();
        let ask = |since: u64, more: &str| {
            first_event(&site, &format!("GET /stream?since={since} HTTP/1.1\r\nHost: h{more}"))
        };
        assert_eq!(ask(0, ""), (last.clone(), vec!["a".to_string(), "b".to_string()]));
        assert_eq!(ask(versions[0], ""), (last.clone(), vec!["b".to_string()]));
        let again = format!("\r\nLast-Event-ID: {}", versions[0]);
        assert_eq!(ask(0, &again), (last, vec!["b".to_string()]));
    }
}
