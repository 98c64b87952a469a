//! `stapo fetch` against a local server that speaks the hub's protocol and can be told to misbehave.

use crate::common::ok;
use crate::terminal::shown;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use stapo_rl::run::disk::hex;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The server's files and its faults.
#[derive(Clone, Default)]
struct Served {
    /// Repository, file, content.
    files: Vec<(&'static str, &'static str, Vec<u8>)>,
    /// The first body is cut after this many bytes; later requests are answered in full.
    cut_after: Option<usize>,
    /// States a hash that is not the content's.
    lies: bool,
    needs_token: bool,
    /// Where requests whose path contains this text are answered with headers and then nothing, for ever.
    stalls_at: Option<&'static str>,
    /// Sends this many bytes more than it announced.
    n_more: usize,
    /// Announces this size instead of the content's.
    announced: Option<u64>,
    /// Answers a request for a part with the whole file.
    ignores_ranges: bool,
    /// The commit of the list of files instead of the right one.
    commit: Option<&'static str>,
    /// Fills the list of files with blanks to this many bytes.
    list_bytes: usize,
}

struct Server {
    address: String,
    /// One line per request: method, path and start of the range, if one is asked for.
    requests: Arc<Mutex<Vec<String>>>,
}

fn serve(served: Served) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let log = requests.clone();
    let state = Arc::new(Mutex::new(served));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // One request per connection, as a hub behind a proxy may do.
            let _ = answer(&stream.unwrap(), &state, &log);
        }
    });
    Server { address, requests }
}

fn answer(stream: &TcpStream, state: &Mutex<Served>, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let mut range = None;
    let mut has_token = false;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if let Some(from) = line.strip_prefix("range: bytes=") {
            range = Some(from.trim_end_matches('-').parse::<usize>().unwrap());
        }
        has_token |= line == "authorization: bearer secret";
        if line.is_empty() {
            break;
        }
    }
    let mut words = request.split(' ');
    let method = words.next().unwrap_or("");
    let path = words.next().unwrap_or("");
    let part = range.map_or(String::new(), |from| format!(" from {from}"));
    log.lock().unwrap().push(format!("{method} {path}{part}"));
    let mut served = state.lock().unwrap();
    let start = range.filter(|_| !served.ignores_ranges).unwrap_or(0);
    if served.needs_token && !has_token {
        return reply(stream, "401 Unauthorized", &[], b"");
    }
    if method == "GET" && served.stalls_at.is_some_and(|text| path.contains(text)) {
        return stall(stream);
    }
    if let Some(repo) =
        path.strip_prefix("/api/").and_then(|path| path.split_once("/revision/")).map(|both| both.0)
    {
        let files: Vec<String> = served
            .files
            .iter()
            .filter(|f| repo.split_once('/').unwrap().1 == f.0)
            .map(|f| format!("{{\"rfilename\":\"{}\"}}", f.1))
            .collect();
        if files.is_empty() {
            return reply(stream, "404 Not Found", &[], b"");
        }
        let (commit, files) = (served.commit.unwrap_or(COMMIT), files.join(","));
        let mut text = format!("{{\"sha\":\"{commit}\",\"siblings\":[{files}]}}");
        text += &" ".repeat(served.list_bytes.saturating_sub(text.len()));
        return reply(stream, "200 OK", &[], text.as_bytes());
    }
    let path = path.trim_start_matches("/datasets").trim_start_matches('/');
    let is_asked = |id: &str, file: &str| {
        path == format!("{id}/resolve/{COMMIT}/{}", file.replace(' ', "%20").replace('#', "%23"))
    };
    let found = served.files.iter().find(|(id, file, _)| is_asked(id, file)).cloned();
    let Some((_, file, content)) = found else { return reply(stream, "404 Not Found", &[], b"") };
    let hash = if Path::new(file).extension().is_some_and(|e| e == "json") {
        hex(&Sha1::new().chain_update(format!("blob {}\0", content.len())).chain_update(&content).finalize())
    } else {
        hex(&Sha256::digest(&content))
    };
    let hash = if served.lies { hash.replace(|c: char| c.is_ascii_digit(), "0") } else { hash };
    let headers = [
        format!("ETag: \"{hash}\""),
        format!("X-Linked-Size: {}", served.announced.unwrap_or(content.len() as u64)),
        "Location: /gone".to_string(),
    ];
    // As the hub does, large files are referred to another server, which is not asked for hash and size.
    let status = if content.len() > 100_000 { "302 Found" } else { "200 OK" };
    if method == "HEAD" {
        return reply(stream, status, &headers, b"");
    }
    let content = [content, vec![b'x'; served.n_more]].concat();
    let body = &content[start..];
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        if start > 0 { "206 Partial Content" } else { "200 OK" },
        body.len()
    );
    { stream }.write_all(head.as_bytes())?;
    match served.cut_after.take() {
        Some(n) => { stream }.write_all(&body[..n.min(body.len())]),
        None => { stream }.write_all(body),
    }
}

/// Announces a body and keeps the connection without sending it.
fn stall(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")?;
    let kept = stream.try_clone()?;
    std::thread::spawn(move || {
        let mut kept = BufReader::new(kept);
        let _ = kept.read_line(&mut String::new());
    });
    Ok(())
}

fn reply(mut stream: &TcpStream, status: &str, headers: &[String], body: &[u8]) -> std::io::Result<()> {
    let headers =
        [headers, &[format!("Content-Length: {}", body.len()), "Connection: close".into()]].concat();
    let head = format!("HTTP/1.1 {status}\r\n{}\r\n\r\n", headers.join("\r\n"));
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

fn fetch(folder: &Path, address: &str, token: Option<&str>, args: &[&str]) -> Output {
    stapo(folder, address, token, &[&["fetch"], args].concat())
}

fn stapo(folder: &Path, address: &str, token: Option<&str>, args: &[&str]) -> Output {
    command(folder, address, token, args).output().unwrap()
}

fn command(folder: &Path, address: &str, token: Option<&str>, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args);
    command.env("HF_ENDPOINT", address).env("HF_HOME", folder.join("hf"));
    command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1");
    for name in ["HF_TOKEN", "HF_HUB_CACHE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env_remove(name);
    }
    command.envs(token.map(|token| ("HF_TOKEN", token)));
    command
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn a_model() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let weights: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    vec![
        ("o/m", "config.json", b"{\"a\": 1}".to_vec()),
        ("o/m", "model.safetensors", weights),
        ("o/m", "pytorch_model.bin", vec![1, 2, 3]),
        ("o/m", "modeling.py", b"boom".to_vec()),
        ("o/m", "preprocessor_config.json", b"{}".to_vec()),
    ]
}

#[test]
fn an_interrupted_transfer_goes_on_and_lands_in_the_usual_cache() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), cut_after: Some(5), ..Served::default() });
    let mut command = command(folder.path(), &server.address, None, &["fetch", "model", "o/m"]);
    let trace = folder.path().join("trace");
    let printed = ok(&command.env("STAPO_DISK_TRACE", &trace).output().unwrap());
    let snapshot = Path::new(printed.trim());
    assert!(snapshot.ends_with(format!("hub/models--o--m/snapshots/{COMMIT}")), "{printed}");
    let model = a_model();
    assert_eq!(std::fs::read(snapshot.join("config.json")).unwrap(), model[0].2);
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), model[1].2);
    assert!(snapshot.join("preprocessor_config.json").exists(), "an export of a multimodal model needs it");
    assert!(!snapshot.join("pytorch_model.bin").exists() && !snapshot.join("modeling.py").exists());
    let requests = server.requests.lock().unwrap().join("\n");
    assert!(requests.contains("config.json from 5"), "{requests}");
    assert!(
        requests.lines().any(|line| line.starts_with("GET ") && line.ends_with("model.safetensors")),
        "{requests}"
    );
    let n = server.requests.lock().unwrap().len();
    ok(&fetch(folder.path(), &server.address, None, &["model", "o/m"]));
    assert_eq!(server.requests.lock().unwrap().len(), n + 1, "what is there is not fetched again");
    if cfg!(debug_assertions) {
        let blobs = snapshot.ancestors().nth(2).unwrap().join("blobs");
        let hash = hex(&Sha256::digest(&model[1].2));
        let [blob, blobs] = [blobs.join(hash), blobs].map(|path| path.display().to_string());
        let done = std::fs::read_to_string(trace).unwrap();
        let done: Vec<_> = done.lines().map(|line| line.split_once(' ').unwrap().1).collect();
        let named = done.iter().position(|line| *line == format!("Rename {blob}")).unwrap();
        let around = [done[named - 1], done[named + 1]];
        assert_eq!(around, [format!("Sync {blob}.incomplete"), format!("Sync {blobs}")], "{done:?}");
    }
}

/// A process that was killed in the middle of a transfer leaves a partial file; the next process requests only the
/// rest.
#[cfg(unix)]
#[test]
fn half_a_file_on_disk_is_completed() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), ..Served::default() });
    let content = a_model()[1].2.clone();
    let blobs = folder.path().join("hf/hub/models--o--m/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", hex(&Sha256::digest(&content))));
    // Half of it, all of it, and more than it has, which begins again.
    let longer = [&content[..], b"x"].concat();
    let cases = [
        (&content[..700_000], Some(" from 700000")),
        (&content[..], None),
        (&longer[..], Some(".safetensors")),
    ];
    for (bytes, expected) in cases {
        std::fs::write(&partial, bytes).unwrap();
        server.requests.lock().unwrap().clear();
        let args = ["model", "o/m", "--file", "model.safetensors"];
        let printed = ok(&fetch(folder.path(), &server.address, None, &args));
        let requests = server.requests.lock().unwrap().clone();
        let got: Vec<&String> =
            requests.iter().filter(|line| line.starts_with("GET ") && line.contains("/resolve/")).collect();
        assert_eq!(got.len(), usize::from(expected.is_some()), "{got:?}");
        assert!(expected.is_none_or(|end| got[0].ends_with(end)), "{got:?}");
        assert_eq!(std::fs::read(printed.trim()).unwrap(), content);
        assert!(!partial.exists());
        std::fs::remove_file(printed.trim()).unwrap();
        std::fs::remove_file(partial.with_extension("")).unwrap();
    }
    // A server that sends the whole file again.
    let whole = serve(Served { files: a_model(), ignores_ranges: true, ..Served::default() });
    std::fs::write(&partial, &content[..700_000]).unwrap();
    let printed =
        ok(&fetch(folder.path(), &whole.address, None, &["model", "o/m", "--file", "model.safetensors"]));
    assert_eq!(std::fs::read(printed.trim()).unwrap(), content);
    std::fs::remove_file(printed.trim()).unwrap();
    std::fs::remove_file(partial.with_extension("")).unwrap();
    // On a terminal the bytes are counted.
    let (status, text) = shown(command(folder.path(), &server.address, None, &["fetch", "model", "o/m"]), "");
    assert!(status.success(), "{text}");
    assert!(text.contains("model.safetensors ") && text.contains(" KiB/1.14 MiB "), "{text}");
}

#[test]
fn a_wrong_hash_is_refused_and_nothing_of_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), lies: true, ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &["model", "o/m"]));
    assert!(said.contains("does not have the hash the hub names"), "{said}");
    let blobs = folder.path().join("hf/hub/models--o--m/blobs");
    assert_eq!(std::fs::read_dir(blobs).unwrap().count(), 0);
}

#[test]
fn tokens_absence_and_silence_are_clear() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let server = serve(Served { files: a_model(), needs_token: true, ..Served::default() });
    let said = complaint(&fetch(at, &server.address, None, &["model", "o/m"]));
    assert!(said.contains("no token was given") && said.contains("HF_TOKEN"), "{said}");
    let said = complaint(&fetch(at, &server.address, Some("wrong"), &["model", "o/m"]));
    assert!(said.contains("is not accepted"), "{said}");
    // The token that `hf auth login` has stored is taken where no other is given.
    std::fs::create_dir_all(at.join("hf")).unwrap();
    std::fs::write(at.join("hf/token"), "secret\n").unwrap();
    ok(&fetch(at, &server.address, None, &["model", "o/m", "--file", "config.json"]));
    assert!(
        complaint(&fetch(at, &server.address, Some("wrong"), &["model", "o/m"])).contains("is not accepted")
    );
    assert_eq!(server.requests.lock().unwrap().last().unwrap(), "GET /api/models/o/m/revision/main");
    ok(&fetch(at, &server.address, Some("secret"), &["model", "o/m"]));
    let said = complaint(&fetch(at, &server.address, Some("secret"), &["model", "o/other"]));
    assert!(said.contains("o/other: not found"), "{said}");
    let said = complaint(&fetch(at, "http://127.0.0.1:9", None, &["dataset", "o/d"]));
    assert!(said.contains("cannot be reached") && said.contains("HF_ENDPOINT"), "{said}");
    let said = complaint(&fetch(at, "ftp://127.0.0.1", None, &["model", "o/m"]));
    assert!(said.contains("HF_ENDPOINT \"ftp://127.0.0.1\": expected an address"), "{said}");
    let args = ["model", "o/m", "--file", "gone.json"];
    let said = complaint(&fetch(at, &server.address, Some("secret"), &args));
    assert!(said.contains("o/m gone.json: not in the repository\nhint: it holds config.json, "), "{said}");
    let said = complaint(&fetch(at, &server.address, Some("secret"), &["model", "../../etc"]));
    assert!(said.contains("expected OWNER/NAME"), "{said}");
    let names = ["../../../evil.safetensors", "/evil.safetensors", "a\\\\evil.safetensors", ""];
    let outside = names.map(|name| ("o/x", name, vec![1])).to_vec();
    let server = serve(Served { files: outside, ..Served::default() });
    for name in ["../../../evil.safetensors", "/evil.safetensors", "a\\evil.safetensors", ""] {
        let said = complaint(&fetch(at, &server.address, None, &["model", "o/x", "--file", name]));
        assert!(said.contains("outside its repository"), "{name}: {said}");
    }
}

#[test]
fn a_name_that_no_repository_can_have_is_refused_before_the_network() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), ..Served::default() });
    for id in ["foo", "a/b/c", "a/", "/b", "a b/c", ".a/b", "a/..", "https://hub/a/b"] {
        for what in ["model", "dataset"] {
            let said = complaint(&fetch(folder.path(), &server.address, None, &[what, id]));
            assert!(said.contains(&format!("repository {id:?}: expected OWNER/NAME, such as ")), "{said}");
        }
    }
    assert!(server.requests.lock().unwrap().is_empty());
}

#[test]
fn a_model_is_fetched_on_request_and_found_by_its_name_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base");
    let names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"];
    let files = names.map(|name| ("o/base", name, std::fs::read(base.join(name)).unwrap()));
    let server = serve(Served { files: files.into(), ..Served::default() });
    let info = |more: &[&str]| {
        stapo(at, &server.address, None, &[&["model", "info", "o/base", "--json"], more].concat())
    };
    assert!(complaint(&info(&[])).contains("hint: stapo fetch model o/base gets it"));
    assert!(server.requests.lock().unwrap().is_empty(), "nothing is fetched without being asked for");
    std::fs::write(at.join("rows.jsonl"), "{\"problem\": \"1+1\", \"answer\": 2}\n").unwrap();
    let init = ["init", "--model", "o/base", "--data", "rows.jsonl", "--fetch"];
    assert!(complaint(&stapo(at, &server.address, None, &init)).contains("too few to hold some out"));
    let said = ok(&info(&["--fetch"]));
    assert!(said.contains(&format!("o/base@{COMMIT}")), "{said}");
    let n = server.requests.lock().unwrap().len();
    assert!(n > 0);
    ok(&info(&["--fetch"]));
    let train = [
        "train",
        "--set",
        "steps=1",
        "--set",
        "rollout.problems_per_step=2",
        "--set",
        "rollout.group_size=2",
    ];
    let more = ["--set", "update.problems_per_minibatch=2", "--set", "evaluation.problems=2", "--out", "run"];
    ok(&stapo(at, &server.address, None, &[&train[..], &more, &["--model", "o/base"]].concat()));
    assert_eq!(server.requests.lock().unwrap().len(), n, "what was fetched is found without the network");
    let plan = std::fs::read_to_string(at.join("run/plan.toml")).unwrap();
    assert!(plan.contains(&format!("o/base@{COMMIT}")), "{plan}");
}

#[test]
fn benchmarks_land_where_eval_looks() {
    let folder = tempfile::tempdir().unwrap();
    let rows = "{\"problem\": \"1+1\", \"answer\": \"2\"}\n{\"problem\": \"2+2\", \"answer\": \"4\"}\n";
    let programs =
        r#"{"task_id": "HumanEval/0", "prompt": "def f():", "test": "def check(f): ..", "entry_point": "f"}"#;
    let files = vec![
        ("math-ai/aime24", "README.md", b"x".to_vec()),
        ("math-ai/aime24", "train.jsonl", b"{}".to_vec()),
        ("math-ai/aime24", "test.jsonl", rows.as_bytes().to_vec()),
        ("openai/openai_humaneval", "openai_humaneval/test.jsonl", programs.as_bytes().to_vec()),
    ];
    let server = serve(Served { files, ..Served::default() });
    let said = ok(&fetch(folder.path(), &server.address, None, &["benchmarks", "aime24", "humaneval"]));
    assert!(said.contains("aime24     2 questions (expected 30)"), "{said}");
    assert!(said.contains("humaneval  1 questions (expected 164)"), "{said}");
    assert_eq!(std::fs::read_to_string(folder.path().join("data/aime24.jsonl")).unwrap(), rows);
    assert!(
        complaint(&fetch(folder.path(), &server.address, None, &["benchmarks", "aime26"]))
            .contains("one of aime24")
    );
}

#[test]
fn a_server_that_falls_silent_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), stalls_at: Some("/api/"), ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &["model", "o/m"]));
    assert!(said.contains("o/m: the hub's list of files") && said.contains("no byte for 1 s"), "{said}");
    let server = serve(Served { files: a_model(), stalls_at: Some("/resolve/"), ..Served::default() });
    let said =
        complaint(&fetch(folder.path(), &server.address, None, &["model", "o/m", "--file", "config.json"]));
    assert!(said.contains("broke off after 3 B of 8 B: no byte for 1 s"), "{said}");
    let mut bad = Command::new(env!("CARGO_BIN_EXE_stapo"));
    let bad = bad.args(["fetch", "model", "o/m"]).env("HF_HUB_DOWNLOAD_TIMEOUT", "0").output().unwrap();
    assert!(complaint(&bad).contains("HF_HUB_DOWNLOAD_TIMEOUT"));
}

#[test]
fn sizes_are_bounded_by_what_was_announced_and_by_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["model", "o/m", "--file", "config.json"];
    let server = serve(Served { files: a_model(), n_more: 100_000, ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &args));
    assert!(said.contains("longer than the 8 B"), "{said}");
    let blobs = folder.path().join("hf/hub/models--o--m/blobs");
    let n_bytes: u64 =
        std::fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(n_bytes <= 8, "{n_bytes} bytes were written");
    let many = vec![("o/m", "a", Vec::new()); 100_001];
    let server = serve(Served { files: many, ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &args));
    assert!(said.contains("the hub's list of files: 100001 files, at most 100000"), "{said}");
    let of_bytes = |list_bytes| serve(Served { files: a_model(), list_bytes, ..Served::default() });
    let said = complaint(&fetch(folder.path(), &of_bytes((16 << 20) + 1).address, None, &args));
    assert!(said.contains("the hub's list of files: more than 16.0 MiB"), "{said}");
    let other = tempfile::tempdir().unwrap();
    ok(&fetch(other.path(), &of_bytes(16 << 20).address, None, &args));
    let server = serve(Served { files: a_model(), commit: Some("../../../evil"), ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &args));
    assert!(said.contains("names the commit \"../../../evil\", expected 40 hexadecimal digits"), "{said}");
    let server = serve(Served { files: a_model(), announced: Some(1 << 60), ..Served::default() });
    let said = complaint(&fetch(folder.path(), &server.address, None, &args));
    assert!(said.contains("the hub names 1048576.0 TiB, at most 1.0 TiB"), "{said}");
}

#[test]
fn a_revision_cannot_leave_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(Served { files: a_model(), ..Served::default() });
    let revision = |name: &str| {
        fetch(
            folder.path(),
            &server.address,
            None,
            &["model", "o/m", "--file", "config.json", "--revision", name],
        )
    };
    for name in ["../../../../evil", "/tmp/evil", "", "a/../../b", ".", "a//b", "a b", "a\\b", "main/"] {
        assert!(complaint(&revision(name)).contains("expected a branch, a tag or a commit"), "{name:?}");
    }
    assert!(server.requests.lock().unwrap().is_empty());
    ok(&revision("refs/pr/1"));
    assert!(folder.path().join("hf/hub/models--o--m/refs/refs/pr/1").is_file());
    let requests = server.requests.lock().unwrap().join("\n");
    assert!(requests.contains("/revision/refs%2Fpr%2F1"), "{requests}");
}

#[test]
fn names_with_spaces_are_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let files = vec![("o/d", "a folder/test #1.jsonl", b"{}\n".to_vec()), ("o/d", "empty.jsonl", Vec::new())];
    let server = serve(Served { files, ..Served::default() });
    let printed = ok(&fetch(folder.path(), &server.address, None, &["dataset", "o/d"]));
    let paths: Vec<&str> = printed.lines().collect();
    assert!(paths[0].ends_with("a folder/test #1.jsonl") && paths[1].ends_with("empty.jsonl"), "{printed}");
    assert_eq!(std::fs::read(paths[0]).unwrap(), b"{}\n");
    assert_eq!(std::fs::read(paths[1]).unwrap(), b"");
    // Data sets have addresses and a folder of their own.
    assert!(paths[1].contains("hf/hub/datasets--o--d/snapshots/"), "{printed}");
    let requests = server.requests.lock().unwrap().clone();
    assert_eq!(requests[0], "GET /api/datasets/o/d/revision/main");
    assert!(requests[1..].iter().all(|line| line.contains(" /datasets/o/d/resolve/")), "{requests:?}");
}
