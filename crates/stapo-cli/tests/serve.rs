//! `stapo serve`: its answers, what it refuses, and its page in a browser while runs train.

use crate::browser::charts::chart_tools;
use crate::browser::runs::{STAPO, hostile, json_lines, lines, train};
use crate::browser::session::Session;
use crate::common::{listing, ok, stapo};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// A server of a folder, which ends with the value.
pub struct Server {
    child: Child,
    /// Kept open: a program whose output nobody reads ends when it says more.
    _output: BufReader<ChildStdout>,
    pub address: String,
    pub token: String,
    /// What it printed at its start.
    pub said: String,
}

impl Server {
    pub fn start(folder: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
            .args(["serve", "--port", "0"])
            .args(arguments)
            .arg(folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        for _ in 0..3 {
            output.read_line(&mut said).unwrap();
        }
        let line = said.lines().next().unwrap();
        let whole = line.split("http://").nth(1).unwrap_or_else(|| panic!("no address: {line}")).trim();
        let (address, token) = whole.split_once('/').unwrap();
        let token = token.trim_start_matches("?token=").to_string();
        Server { child, _output: output, address: address.to_string(), token, said }
    }

    /// The status, the head and the body of an answer to a page that has the token.
    pub fn ask(&self, target: &str, headers: &str) -> (u16, String, String) {
        let port = self.address.rsplit(':').next().unwrap();
        self.ask_bare(target, &format!("Cookie: stapo_token_{port}={}\r\n{headers}", self.token))
    }

    pub fn ask_bare(&self, target: &str, headers: &str) -> (u16, String, String) {
        self.send(&format!("GET {target} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n", self.address))
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.replace("0.0.0.0", "127.0.0.1")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    pub fn send(&self, request: &str) -> (u16, String, String) {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        // A server that refuses early closes while the request is still being written.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        (status, head.to_string(), body.to_string())
    }

    pub fn json(&self, target: &str) -> Value {
        let (status, _, body) = self.ask(target, "");
        assert_eq!(status, 200, "{target}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    pub fn page(&self, hash: &str) -> String {
        format!("http://{}/?token={}{hash}", self.address, self.token)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn row<'a>(list: &'a Value, id: &str) -> &'a Value {
    let rows = list["rows"].as_array().unwrap();
    rows.iter().find(|row| row["id"] == id).unwrap_or_else(|| panic!("no {id} in {list}"))
}

/// Metrics of a run that never was, with a spike and all keys that charts look for.
pub fn invented(folder: &Path, n_steps: usize) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("plan.toml"), format!("name = \"long\"\nseed = 3\nsteps = {n_steps}\n"))
        .unwrap();
    let line = |step: usize| {
        json!({"schema": 1, "step": step, "accuracy": if step == 7001 { 9.0 } else { 0.5 }, "reward_mean": step as f64 / n_steps as f64,
            "loss": -1e-4, "n_tokens": 100, "unheard_of": {"number": step % 7}})
    };
    std::fs::write(folder.join("metrics.jsonl"), json_lines((1..=n_steps).map(line))).unwrap();
}

/// Runs that cannot be read, each in its own way.
fn broken(at: &Path) {
    for name in ["no-plan", "bad-plan", "bad-metrics", "empty", "linked"] {
        std::fs::create_dir_all(at.join(name)).unwrap();
        std::fs::write(at.join(name).join("plan.toml"), "steps = 5\n").unwrap();
    }
    std::fs::remove_file(at.join("no-plan/plan.toml")).unwrap();
    std::fs::write(at.join("no-plan/metrics.jsonl"), "{\"schema\":1,\"step\":1,\"loss\":1}\n").unwrap();
    std::fs::write(at.join("bad-plan/plan.toml"), "steps = = 5").unwrap();
    std::fs::write(at.join("bad-metrics/metrics.jsonl"), "garbage\nmore of it\n").unwrap();
    std::fs::write(at.join("secret"), "steps = 1\n").unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(at.join("secret"), at.join("linked/metrics.jsonl")).unwrap();
}

#[test]
fn answers_have_the_numbers_of_the_files_and_nothing_outside_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("outside"), "secret").unwrap();
    train(at, "runs/exp/stapo", STAPO, 0);
    let experiment = json!({"schema": 1, "name": "e", "method": null, "arms": [{"name": "s", "seed": 0, "run": "stapo", "settings": []}]});
    std::fs::write(at.join("runs/exp/experiment.json"), experiment.to_string()).unwrap();
    invented(&at.join("runs/long"), 10_000);
    broken(&at.join("runs"));
    let before = listing(&at.join("runs"));
    let server = Server::start(&at.join("runs"), &[]);
    let list = server.json("/api/runs");
    let run = row(&list, "exp/stapo");
    assert_eq!((&run["status"]["kind"], &run["step"], &run["arm"]), (&json!("done"), &json!(4), &json!("s")));
    let metrics = lines(at.join("runs/exp/stapo/metrics.jsonl"));
    assert_eq!(run["last"]["entropy_mean"], metrics[3]["entropy_mean"]);
    for (id, kind, reason) in [
        ("no-plan", "broken", "plan.toml"),
        ("bad-plan", "broken", "plan.toml"),
        ("bad-metrics", "broken", "no records"),
        ("linked", "broken", "symbolic link"),
        ("empty", "stopped", ""),
        ("long", "done", ""),
    ] {
        let status = &row(&list, id)["status"];
        assert_eq!(status["kind"], kind, "{id}: {status}");
        assert!(status["text"].as_str().unwrap().contains(reason), "{id}: {status}");
    }
    let curves =
        server.json("/api/series?run=exp/stapo&key=entropy_mean&key=entropy_quantiles.q05&key=eval_accuracy");
    let of = |key: &str| &curves["runs"][0]["curves"][key];
    let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-6;
    for (idx, line) in metrics.iter().enumerate() {
        assert!(near(&of("entropy_mean")["y"][idx], &line["entropy_mean"]), "{curves}");
        assert!(near(&of("entropy_quantiles.q05")["y"][idx], &line["entropy_quantiles"]["q05"]), "{curves}");
    }
    assert_eq!(of("eval_accuracy")["x"], json!([0.0, 2.0, 4.0]));
    let long = server.json("/api/series?run=long&key=accuracy&points=300");
    let long = &long["runs"][0]["curves"]["accuracy"];
    assert_eq!(long["x"].as_array().unwrap().len(), 300);
    assert!(long["high"].as_array().unwrap().contains(&json!(9.0)), "the spike is lost");
    let window = server.json("/api/series?run=long&key=accuracy&points=300&from=7000&to=7100");
    assert_eq!(window["runs"][0]["curves"]["accuracy"]["x"].as_array().unwrap().len(), 101);
    assert_eq!(
        server.json("/api/series?run=long&key=loss&after=9998")["runs"][0]["curves"]["loss"]["x"],
        json!([9999.0, 10000.0])
    );
    let recorded = lines(at.join("runs/exp/stapo/rollouts/step-000002.jsonl"));
    let responses = server.json("/api/responses?run=exp/stapo&step=2");
    assert_eq!(responses["responses"].as_array().unwrap().len(), recorded.len());
    assert_eq!(responses["responses"][0]["text"], recorded[0]["text"]);
    assert_eq!(
        server.json("/api/tokens?run=exp/stapo&step=2")["responses"][0]["logp"],
        recorded[0]["tokens"]["logp"]
    );
    let compared = server.json("/api/compare?experiment=exp");
    assert_eq!(compared["arms"], json!([{"name": "s", "runs": ["exp/stapo"]}]));
    assert!(compared["tables"].to_string().contains("held-out accuracy"), "{compared}");
    let differing = server.json("/api/differences?run=long&run=empty");
    assert!(differing["runs"][0]["settings"].to_string().contains(r#"["steps","10000"]"#), "{differing}");
    for target in [
        "/api/run?run=..",
        "/api/run?run=../outside",
        "/api/run?run=%2e%2e%2foutside",
        "/api/run?run=/etc",
        "/../outside",
        "/outside",
        "/api/run?run=.",
        "/api/responses?run=exp/stapo&step=3",
        "/api/responses?run=exp/stapo/../../..&step=2",
        "/api/nothing",
    ] {
        let (status, _, body) = server.ask(target, "");
        assert!(status == 404 && !body.contains("secret"), "{target}: {status} {body}");
    }
    drop(server);
    assert_eq!(listing(&at.join("runs")), before, "the server wrote something");
}

/// Starts a training run and returns its process.
fn start_training(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.arg("train").args(arguments).current_dir(folder);
    command.stdout(Stdio::null()).stderr(Stdio::null()).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.spawn().unwrap()
}

/// The last step in a run's metrics.
fn last_step(run: &Path) -> u64 {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole
        .lines()
        .last()
        .map_or(0, |line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap())
}

fn assert_clean(session: &Session, server: &Server) {
    assert_eq!(session.problems, [""; 0]);
    let own = format!("http://{}/", server.address);
    let foreign: Vec<&String> = session
        .requests
        .iter()
        .filter(|url| !url.starts_with(&own) && !url.starts_with("data:") && *url != "about:blank")
        .collect();
    assert!(foreign.is_empty(), "requests outside: {foreign:?}");
}

/// How many points the page draws of a run's accuracy.
const N_POINTS: &str =
    "(document.querySelector('#accuracy .curve')?.getAttribute('d').match(/[ML]/g) || []).length";

/// The page asks which numbers a run has, and then for their values: a step written between the questions is not lost, also where
/// the page hears of it before the answer.
#[test]
fn a_step_written_while_the_page_asks_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("late");
    invented(&run, 0);
    let server = Server::start(folder.path(), &[]);
    let Some(mut session) = Session::start() else { return };
    session.resize(1300, 900);
    session.open(&server.page(""));
    session.until("document.querySelector('a[href*=\"run=late\"]')");
    session.value(
        "(()=>{const ask=fetch;const held=new Promise((go)=>{window.release=go});\
         window.fetch=async(url)=>{if(url.startsWith('/api/series')){window.isHeld=true;await held}return ask(url)};\
         document.querySelector('a[href*=\"run=late\"]').click()})()",
    );
    session.until("window.isHeld");
    let write = |step: u64| {
        let mut metrics = std::fs::OpenOptions::new().append(true).open(run.join("metrics.jsonl")).unwrap();
        writeln!(metrics, "{}", json!({"schema": 1, "step": step, "accuracy": 0.5})).unwrap();
    };
    write(1);
    session.until("stapo.app.rows.get('late').step === 1");
    session.value("window.release()");
    session.until("document.querySelector('#accuracy')");
    write(2);
    session.until(&format!("{N_POINTS} === 2"));
    assert_clean(&session, &server);
}

/// A run is watched from its first step to its last, killed and resumed in between. Points appear as lines are written.
#[test]
fn a_run_is_watched_from_first_step_to_last_with_a_kill_between() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("runs")).unwrap();
    let server = Server::start(&at.join("runs"), &[]);
    let Some(mut session) = Session::start() else { return };
    session.resize(1300, 900);
    session.open(&server.page(""));
    session.until("document.querySelector('#live')?.textContent === 'live'");
    // More steps than it makes before it is killed, however late the page sees them.
    let settings = [
        "--set",
        "steps=100000",
        "--set",
        "rollout.problems_per_step=4",
        "--set",
        "update.problems_per_minibatch=4",
        "--set",
        "record.checkpoint_every_steps=2",
        "--set",
        "evaluation.problems=8",
        "--set",
        "evaluation.every_steps=100",
    ];
    let mut training = start_training(at, &[&["--out", "runs/live"][..], &settings[..]].concat());
    session.until("[...document.querySelectorAll('.badge.running')].length === 1");
    session.value("document.querySelector('a[href*=\"run=live\"]').click()");
    session.until(&format!("{N_POINTS} >= 2"));
    training.kill().unwrap();
    training.wait().unwrap();
    let written = last_step(&at.join("runs/live"));
    let late = session.until(&format!("{N_POINTS} >= {written}"));
    println!("the page has every written point {} ms after the kill", late.as_millis());
    session.until("document.querySelector('.badge.died')");
    let n_steps = written as usize + 3;
    ok(&stapo(at, &["train", "--resume", "runs/live", "--set", &format!("steps={n_steps}")]));
    session.until(&format!("{N_POINTS} === {n_steps} && document.querySelector('.badge.done')"));
    assert!(session.value("document.querySelectorAll('.mark.resume').length").as_u64().unwrap() > 0);
    let metrics = lines(at.join("runs/live/metrics.jsonl"));
    let shown = session.value("(async()=>(await stapo.app.ask('/api/series',{run:'live',key:'accuracy'})).runs[0].curves.accuracy.y)()");
    let expected: Vec<f64> =
        metrics.iter().map(|m| f64::from(m["accuracy"].as_f64().unwrap() as f32)).collect();
    let shown: Vec<f64> = shown.as_array().unwrap().iter().map(|y| y.as_f64().unwrap()).collect();
    assert!(
        shown.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6) && shown.len() == n_steps,
        "{shown:?} {expected:?}"
    );
    assert_clean(&session, &server);
}

/// Every view of runs that are long, broken or hostile: drawn, without scripts of theirs, at both widths and in both themes.
#[test]
fn every_view_shows_long_broken_and_hostile_runs() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    hostile(at);
    train(at, "good", STAPO, 0);
    invented(&at.join("long"), 10_000);
    broken(at);
    let server = Server::start(at, &[]);
    let Some(mut session) = Session::start() else { return };
    session.resize(1300, 900);
    session.open(&server.page("#/runs"));
    session.until("document.querySelectorAll('tr[data-id]').length === 8");
    assert_eq!(session.value("[...document.querySelectorAll('.badge.broken')].length"), 4);
    // A search, a choice and their address.
    session.value("(()=>{const f=document.querySelector('input[type=search]');f.value='good';f.dispatchEvent(new Event('input'))})()");
    assert_eq!(
        session.value("[...document.querySelectorAll('tr[data-id]')].map(r=>r.dataset.id).join()"),
        "good"
    );
    assert!(session.value("location.hash").as_str().unwrap().contains("find=good"));
    long_run(&mut session, &server);
    let parts = session.value("stapo.difference('so 2 + 3 is 5', 'so 2 + 3 = 6')");
    assert_eq!(
        parts,
        json!([["=", "so 2 + 3 "], ["-", "is"], ["+", "="], ["=", " "], ["-", "5"], ["+", "6"]])
    );
    let flips = session.value("stapo.flips({shares: [0.25, null, 1, 0.5, 0.75]})");
    assert_eq!(
        flips,
        json!([{"from": 0, "to": 2, "isRight": true}, {"from": 2, "to": 3, "isRight": false}, {"from": 3, "to": 4, "isRight": true}])
    );
    for (width, theme, paper) in [(1300, "light", "rgb(253, 253, 252)"), (390, "dark", "rgb(21, 24, 28)")] {
        session.resize(width, 900);
        session.theme(theme);
        for (view, shown) in [
            ("#/runs", "document.querySelectorAll('tr[data-id]').length === 8"),
            ("#/run?run=bad", "document.querySelectorAll('#accuracy .curve').length === 1"),
            ("#/responses?run=bad&step=2", "document.querySelectorAll('.group article').length > 0"),
            ("#/tokens?run=bad&step=2", "document.querySelectorAll('.t[data-at]').length > 100"),
            (
                "#/compare?run=bad&run=good",
                "document.querySelectorAll('#compare-accuracy .curve').length >= 2 && document.querySelectorAll('table').length > 0",
            ),
            ("#/evaluations", "document.querySelector('.missing')"),
            ("#/run?run=bad-metrics", "document.querySelector('.problem')"),
        ] {
            session.open(&server.page(""));
            session.value(&format!("location.hash = {}", json!(view)));
            session.until(shown);
            let found = session.value("[document.documentElement.scrollWidth - innerWidth, getComputedStyle(document.body).backgroundColor, document.querySelectorAll('img').length, typeof problems]");
            assert!(found[0].as_i64().unwrap() <= 0, "{view} is wider than {width}: {found}");
            assert_eq!(
                (&found[1], &found[2], &found[3]),
                (&json!(paper), &json!(0), &json!("undefined")),
                "{view}"
            );
        }
    }
    assert_clean(&session, &server);
}

/// One finger pans a chart that is zoomed, two zoom further. `[x, y, width]` is where the chart is touched.
fn fingers(session: &mut Session, [x, y, width]: [f64; 3]) {
    session.value("document.getElementById('accuracy').scrollIntoView()");
    let window = |session: &mut Session| {
        let ends = session
            .value("['from','to'].map(n=>Number(new URLSearchParams(location.hash.split('?')[1]).get(n)))");
        [0, 1].map(|idx| ends[idx].as_f64().unwrap())
    };
    let at = |part: f64| (x + part * width, y);
    let [from, to] = window(session);
    session.touch("touchStart", &[at(0.8)]);
    for part in [0.7, 0.6, 0.55] {
        session.touch("touchMove", &[at(part)]);
    }
    session.touch("touchEnd", &[]);
    let panned = window(session);
    let shift = 0.25 * (to - from);
    assert!((panned[0] - from - shift).abs() < 0.1 * shift, "{from} to {to} became {panned:?}");
    assert!((panned[1] - to - shift).abs() < 0.1 * shift, "{from} to {to} became {panned:?}");
    session.touch("touchStart", &[at(0.4), at(0.6)]);
    session.touch("touchMove", &[at(0.35), at(0.65)]);
    session.touch("touchMove", &[at(0.3), at(0.7)]);
    session.touch("touchEnd", &[]);
    let zoomed = window(session);
    let share = (zoomed[1] - zoomed[0]) / (panned[1] - panned[0]);
    assert!((share - 0.5).abs() < 0.05, "{panned:?} became {zoomed:?}");
}

/// 10,000 steps: few points, the spike, a zoom with the mouse, a link that restores it, a legend, files.
fn long_run(session: &mut Session, server: &Server) {
    session.open(&server.page("#/run?run=long"));
    session.until("document.querySelector('#accuracy .curve')");
    let n_points = "document.querySelector('#accuracy .curve').getAttribute('d').match(/[ML]/g).length";
    let n = session.value(n_points).as_u64().unwrap();
    assert!((100..=1000).contains(&n), "{n} points");
    session.value("document.getElementById('accuracy').scrollIntoView()");
    let hit = "(()=>{const b=document.querySelector('#accuracy .hit').getBoundingClientRect();return [b.x,b.y,b.width,b.height]})()";
    let place = session.value(hit);
    let [x, y, width] = [0, 1, 2].map(|idx| place[idx].as_f64().unwrap());
    session.mouse("mouseMoved", x + 0.5 * width, y + 40.0);
    session.until(
        "!document.getElementById('tip').hidden && document.querySelectorAll('#tip .swatch').length === 1",
    );
    for (kind, part) in
        [("mousePressed", 0.6), ("mouseMoved", 0.7), ("mouseMoved", 0.8), ("mouseReleased", 0.8)]
    {
        session.mouse(kind, x + part * width, y + 40.0);
    }
    session.until("location.hash.includes('from=')");
    session.until("Math.max(...[...document.querySelectorAll('#accuracy text')].map(t=>Number(t.textContent)||0)) > 800");
    let zoomed = session.value("location.hash").as_str().unwrap().to_string();
    session.open("about:blank");
    session.open(&server.page(&zoomed));
    session.until("document.querySelector('#accuracy .curve')");
    let first = session
        .value("Number(document.querySelectorAll('#accuracy text[text-anchor=middle]')[0].textContent)");
    assert!((5900.0..7500.0).contains(&first.as_f64().unwrap()), "the link lost the zoom: {first}");
    fingers(session, [x, y + 40.0, width]);
    let saved = session.value("(async()=>{let saved=null;const make=URL.createObjectURL;URL.createObjectURL=b=>{saved=b;return make(b)};const out=[];\
        for(const b of document.querySelectorAll('#accuracy .tools button:not([aria-pressed])')){b.click();out.push(await saved.text())}return out})()");
    let svg = saved[0].as_str().unwrap();
    assert!(svg.starts_with("<svg") && !svg.contains("var(--"), "{svg}");
    assert!(saved[1].as_str().unwrap().starts_with("line,step,value,low,high\r\naccuracy,"), "{saved}");
    chart_tools(session);
}
