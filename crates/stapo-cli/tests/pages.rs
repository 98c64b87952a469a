//! `stapo report` and `stapo inspect`: what they write, and how it behaves in a browser.

mod given;

use crate::browser::probe;
use crate::browser::runs::{STAPO, hostile, json_lines, lines, read, train};
use crate::common::{complaint, ok, stapo};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

/// One run that several tests read and none changes.
static RUN: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), "run", STAPO, 0);
    folder
});

/// Fails if a page refers to anything outside itself. The name of the SVG elements looks like an address and is none.
fn assert_self_contained(html: &str) {
    let html = html.replace("\"http://www.w3.org/2000/svg\"", "");
    for reach in ["http://", "https://", "src=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
        assert!(!html.contains(reach), "the page has {reach}");
    }
}

/// A script that finds figures without a drawn mark (`empty`) and texts outside their figure (`outside`).
const DRAWN: &str = "(()=>{const figures=[...document.querySelectorAll('figure')];return{\
    names:figures.map(f=>f.id),width:innerWidth,overflow:document.documentElement.scrollWidth-innerWidth,\
    empty:figures.filter(f=>![...f.querySelectorAll('svg path[d],svg circle,svg rect[data-t]')].some(m=>m.getBoundingClientRect().width>0)).map(f=>f.id),\
    outside:figures.flatMap(f=>{const s=f.querySelector('svg'),v=s.viewBox.baseVal;return[...s.querySelectorAll('text')].filter(t=>{const b=t.getBBox();\
        return b.x<-1||b.y<-1||b.x+b.width>v.width+1||b.y+b.height>v.height+1}).map(t=>f.id+': '+t.textContent)}),\
    hovers:document.querySelectorAll('[data-t]').length}})()";

fn assert_drawn(found: &Value) {
    assert_eq!(found["empty"], json!([]), "{found}");
    assert_eq!(found["outside"], json!([]), "{found}");
    assert!(found["hovers"].as_u64().unwrap() > 20, "{found}");
    assert!(found["overflow"].as_i64().unwrap() <= 0, "the page is wider than its window: {found}");
}

#[test]
fn a_report_on_a_run_has_its_curves_tokens_and_plan() {
    let at = RUN.path();
    let said = ok(&stapo(
        at,
        &["report", "run", "-o", "page.html", "--csv", "csv", "--png", "png", "--tensorboard", "tb"],
    ));
    assert_eq!(said.lines().collect::<Vec<_>>(), ["page.html", "csv", "png", "tb"]);
    let html = read(at.join("page.html"));
    assert_self_contained(&html);
    for part in [
        "Held-out accuracy",
        "stapo train run/plan.toml",
        "stapo verify run --replay",
        "Spurious tokens",
        "tau_p = 0.2",
    ] {
        assert!(html.contains(part), "no {part}");
    }
    let manifest: Value = serde_json::from_str(&read(at.join("run/manifest.json"))).unwrap();
    for input in manifest["inputs"].as_array().unwrap() {
        assert!(html.contains(input["sha256"].as_str().unwrap()));
    }
    let metrics = lines(at.join("run/metrics.jsonl"));
    let csv = read(at.join("csv/metrics.csv"));
    assert_eq!(csv.lines().count(), 1 + metrics.len());
    let n_silenced: u64 = metrics.iter().map(|m| m["n_silenced"].as_u64().unwrap()).sum();
    assert!(n_silenced > 0 && html.contains(&format!("{n_silenced} of ")), "{n_silenced}");
    for name in ["overview", "held-out-accuracy", "entropy", "quadrants", "entropy-change"] {
        let png = std::fs::read(at.join(format!("png/{name}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 5000, "{name}");
    }
    assert!(at.join("tb/stapo-seed0").read_dir().unwrap().next().is_some());
    for width in [1200, 390] {
        let Some(found) = probe(&at.join("page.html"), width, DRAWN) else { return };
        assert_drawn(&found);
        assert_eq!(found["width"], width);
        let names = found["names"].to_string();
        for name in
            ["held-out-accuracy", "reward", "entropy-quantiles", "silenced-share", "gradient-by-quadrant"]
        {
            assert!(names.contains(name), "no {name} in {names}");
        }
    }
}

/// A legend entry is clicked off and on, the text under the pointer has a line per shown curve and stands beside its
/// point, and numbers have one notation in pages and program.
#[test]
fn legends_hide_their_curves_and_the_pointer_tells_beside_the_point() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "a-0", STAPO, 0);
    train(at, "a-1", STAPO, 1);
    train(at, "b", r#"{preset="justrl"}"#, 0);
    let said = ok(&stapo(at, &["report", "a-0", "a-1", "b", "--csv", "csv"]));
    assert_eq!(said.lines().next(), Some("report.html"));
    let differing = read(at.join("csv/differences.csv"));
    assert!(differing.starts_with("setting,a,b\r\n") && differing.contains("objective."), "{differing}");
    assert!(!differing.contains("\nseed,"), "the seeds of an arm are no difference: {differing}");
    assert_eq!(read(at.join("csv/arms.csv")).lines().count(), 3);
    assert!(read(at.join("report.html")).contains("<details><summary>Plan of"), "the plan is folded");
    let play = "(()=>{const f=document.getElementById('training-accuracy'),key=f.querySelector('.key[data-key=\"1\"]'),\
        hit=f.querySelectorAll('.hit')[1],tip=document.getElementById('tip'),out={};f.scrollIntoView();\
        const hover=()=>{const b=hit.getBoundingClientRect();hit.dispatchEvent(new PointerEvent('pointermove',{bubbles:true,clientX:b.x+b.width/2,clientY:b.y+60}));\
        return [...tip.querySelectorAll('.line')].map(l=>[l.textContent,l.querySelector('.swatch').style.background])};\
        out.both=hover();const c=f.querySelector('.cross circle').getBoundingClientRect(),t=tip.getBoundingClientRect();\
        out.covers=t.left<c.right&&t.right>c.left&&t.top<c.bottom&&t.bottom>c.top;\
        out.dots=f.querySelectorAll('.cross circle').length;key.dispatchEvent(new MouseEvent('click',{bubbles:true}));\
        out.one=hover();out.off=[...f.querySelectorAll('[data-of=\"1\"]')].every(g=>getComputedStyle(g).display==='none');\
        key.dispatchEvent(new KeyboardEvent('keydown',{key:'Enter',bubbles:true}));out.again=hover().length;\
        out.numbers=[0,0.14098,63.671,4769,55799,1.6e-4,-0.5,1,0.002,2.5e7].map(x=>stapo.number(x));\
        out.overflow=document.documentElement.scrollWidth-innerWidth;return out})()";
    for width in [1200, 390] {
        let Some(found) = probe(&at.join("report.html"), width, play) else { return };
        let both = found["both"].as_array().unwrap();
        assert!(
            both[0][0].as_str().unwrap().starts_with("a  ")
                && both[0][0].as_str().unwrap().contains("(seeds "),
            "{found}"
        );
        assert_eq!(
            (&both[0][1], &both[1][1], both.len()),
            (&json!("var(--s0)"), &json!("var(--s1)"), 2),
            "{found}"
        );
        assert_eq!(
            (&found["covers"], &found["dots"], &found["off"]),
            (&json!(false), &json!(2), &json!(true)),
            "{found}"
        );
        assert_eq!((found["one"].as_array().unwrap().len(), &found["again"]), (1, &json!(2)), "{found}");
        let expected = ["0", "0.141", "63.7", "4769", "55799", "1.6e-4", "-0.5", "1", "0.002", "2.5e7"];
        assert_eq!(found["numbers"], json!(expected));
        assert!(found["overflow"].as_i64().unwrap() <= 0, "{found}");
    }
    assert!(complaint(at, &["report", "b", "b"]).contains("named twice"));
}

#[test]
fn the_theme_button_goes_round() {
    let at = RUN.path();
    ok(&stapo(at, &["report", "run", "-o", "theme.html"]));
    let press = "(()=>{const b=document.getElementById('theme'),seen=[];for(let i=0;i<3;i++){b.click();\
        seen.push([b.textContent,getComputedStyle(document.body).backgroundColor])}return seen})()";
    let Some(found) = probe(&at.join("theme.html"), 1200, press) else { return };
    assert_eq!(found[0], json!(["theme: light", "rgb(253, 253, 252)"]));
    assert_eq!(found[1], json!(["theme: dark", "rgb(21, 24, 28)"]));
    assert_eq!(found[2][0], "theme: system");
}

/// Candidates and silenced tokens that `stapo objective` counts for the recorded responses, mini-batch by mini-batch.
fn objective_counts(folder: &Path, responses: &[Value], settings: &[String]) -> (u64, u64) {
    let n_updates = 1 + responses.iter().map(|r| r["update_idx"].as_u64().unwrap()).max().unwrap();
    let mut counts = (0, 0);
    for update in 0..n_updates {
        let members = responses.iter().filter(|r| r["update_idx"] == update);
        let line = |r: &Value| {
            let tokens = &r["tokens"];
            json!({"group": r["problem_id"], "reward": r["reward"], "logp": tokens["logp"],
                "behavior_logp": tokens["behavior_logp"], "entropy": tokens["entropy"],
                "collision": tokens["collision"]})
        };
        let batch = json_lines(members.map(line));
        std::fs::write(folder.join("batch.jsonl"), batch).unwrap();
        let mut args = vec!["objective", "batch.jsonl"];
        args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let total = ok(&stapo(folder, &args));
        let total: Value = serde_json::from_str(total.lines().last().unwrap()).unwrap();
        counts.0 += total["n_candidates"].as_u64().unwrap();
        counts.1 += total["n_silenced"].as_u64().unwrap();
    }
    counts
}

#[test]
fn sliders_give_the_counts_of_the_objective() {
    let at = RUN.path();
    ok(&stapo(at, &["inspect", "run", "--step", "2", "-o", "tokens.html"]));
    assert_self_contained(&read(at.join("tokens.html")));
    let responses = lines(at.join("run/rollouts/step-000002.jsonl"));
    let tau_p = |tau_p: f64| json!({"kind": "tau_p", "tau": tau_p});
    let settings = [
        (tau_p(0.2), 0.75, "low_entropy", "candidates"),
        (tau_p(0.5), 0.33, "low_entropy", "candidates"),
        (tau_p(0.8), 1.0, "low_entropy", "candidates"),
        (tau_p(0.3), 0.5, "high_entropy", "candidates"),
        (tau_p(0.3), 0.8, "low_entropy", "all_tokens"),
        (tau_p(0.3), 0.8, "low_entropy", "rewarded_tokens"),
        (tau_p(0.1), 0.5, "full", "candidates"),
        (tau_p(1e-5), 0.5, "low_entropy", "candidates"),
        (json!({"kind": "target_share", "share": 0.05}), 0.75, "low_entropy", "candidates"),
        (json!({"kind": "surprise", "c": 1.0, "b": 0.5}), 0.75, "low_entropy", "rewarded_tokens"),
        (json!({"kind": "influence", "kappa": 0.4}), 0.75, "high_entropy", "all_tokens"),
    ];
    let slide = format!(
        "(()=>{{const at=id=>document.getElementById(id),taus=JSON.parse(at('recorded').textContent).tau_p;\
         const counts=()=>[Number(at('counts').dataset.candidates),Number(at('counts').dataset.silenced),\
         document.querySelectorAll('.tokens .silenced').length,at('counts').textContent];\
         const opened=counts();return [opened,...{}.map(([threshold,q,select,over])=>{{\
         at('threshold').value=threshold.kind;for(const [id,value] of Object.entries(threshold))if(id==='tau')\
         at('tau').value=taus.findIndex(([t])=>t===value);else if(id!=='kind')at(id).value=value;\
         at('q').value=q;at('select').value=select;at('over').value=over;\
         at('q').dispatchEvent(new Event('input'));return counts()}})]}})()",
        json!(settings)
    );
    let Some(found) = probe(&at.join("tokens.html"), 1200, &slide) else { return };
    let mut n_distinct = std::collections::BTreeSet::new();
    for ((threshold, q, select, over), found) in settings.iter().zip(&found.as_array().unwrap()[1..]) {
        let mut overrides = vec![
            format!("masks.0.q={q:?}"),
            format!("masks.0.select=\"{select}\""),
            format!("masks.0.quantile_over=\"{over}\""),
        ];
        overrides.push(match threshold["tau"].as_f64() {
            Some(tau_p) => format!("masks.0.tau_p={tau_p:e}"),
            None => format!("masks.0.threshold={}", toml::Value::try_from(threshold).unwrap()),
        });
        let (n_candidates, n_silenced) = objective_counts(at, &responses, &overrides);
        assert_eq!(found[0], n_candidates, "{overrides:?}: {found}");
        assert_eq!(found[1], n_silenced, "{overrides:?}: {found}");
        assert_eq!(found[2], n_silenced, "tokens drawn as silenced, {overrides:?}: {found}");
        n_distinct.insert((n_candidates, n_silenced));
    }
    assert!(n_distinct.len() >= 5, "settings that all count the same show nothing: {n_distinct:?}");
    // The page opens with the fates of training. Every token of the step is recorded, so the settings of the run give them
    // again.
    let trained = lines(at.join("run/metrics.jsonl"))[1].clone();
    for shown in [&found[0], &found[1]] {
        assert_eq!((&shown[0], &shown[1]), (&trained["n_candidates"], &trained["n_silenced"]));
    }
    assert!(found[0][3].as_str().unwrap().starts_with("As trained: "), "{found}");
}

#[test]
fn the_viewer_filters_finds_sorts_and_tells() {
    let at = RUN.path();
    ok(&stapo(at, &["inspect", "run", "--step", "2", "-o", "viewer.html"]));
    let responses = lines(at.join("run/rollouts/step-000002.jsonl"));
    let play = "(()=>{const at=id=>document.getElementById(id),set=(id,value,type)=>{at(id).value=value;at(id).dispatchEvent(new Event(type))};\
        const out={};out.all=document.querySelectorAll('article').length;\
        set('only','silenced','change');out.silenced=document.querySelectorAll('.t.hit').length;set('only','all','change');\
        set('find','BOXED','input');out.none=document.querySelectorAll('article').length;\
        set('find','<|END','input');out.ends=document.querySelectorAll('.t.hit').length;set('find','','input');\
        set('sort','length','change');out.lengths=[...document.querySelectorAll('.tokens')].map(l=>l.querySelectorAll('.t').length);\
        out.colors={};for(const by of ['probability','entropy','advantage','ratio','norm']){set('by',by,'change');\
        out.colors[by]=new Set([...document.querySelectorAll('.tokens .t')].map(t=>t.style.background)).size}\
        const t=document.querySelector('.tokens .t');t.dispatchEvent(new PointerEvent('pointerover',{bubbles:true}));\
        t.dispatchEvent(new PointerEvent('pointermove',{bubbles:true,clientX:50,clientY:200}));out.tip=at('tip').textContent;\
        out.overflow=document.documentElement.scrollWidth-innerWidth;out.width=innerWidth;return out})()";
    let Some(found) = probe(&at.join("viewer.html"), 390, play) else { return };
    let tokens = |r: &Value| r["tokens"]["text"].as_array().unwrap().clone();
    let count = |of: &dyn Fn(&Value, usize) -> bool| {
        responses.iter().map(|r| (0..tokens(r).len()).filter(|&t| of(r, t)).count()).sum::<usize>()
    };
    assert_eq!(found["all"], responses.len());
    assert_eq!(found["silenced"], count(&|r, t| !r["tokens"]["silenced_by"][t].is_null()));
    assert_eq!(found["none"], 0, "tokens are single characters here");
    assert_eq!(found["ends"], count(&|r, t| r["tokens"]["text"][t].as_str().unwrap().contains("<|end")));
    let mut lengths: Vec<usize> = responses.iter().map(|r| tokens(r).len()).collect();
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    assert_eq!(found["lengths"], json!(lengths));
    for by in ["probability", "entropy", "advantage", "norm"] {
        assert!(found["colors"][by].as_u64().unwrap() > 2, "{by}: {found}");
    }
    let tip = found["tip"].as_str().unwrap();
    for part in ["probability", "entropy", "advantage", "ratio", "gradient norm", "likeliest"] {
        assert!(tip.contains(part), "{tip}");
    }
    assert!(found["overflow"].as_i64().unwrap() <= 0, "{found}");
}

#[test]
fn a_response_with_markup_in_it_is_only_text() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    hostile(at);
    ok(&stapo(at, &["report", "bad", "-o", "report.html"]));
    ok(&stapo(at, &["inspect", "bad", "--step", "2", "-o", "inspect.html"]));
    for page in ["report.html", "inspect.html"] {
        let html = read(at.join(page));
        assert!(!html.contains("<img") && !html.contains("<script>problems"), "{page}");
    }
    let said = ok(&stapo(at, &["inspect", "bad", "--step", "2", "--terminal"]));
    assert!(said.contains("␛[2J") && !said.contains('\u{1b}'), "control characters reach the terminal");
    let count = "[document.querySelectorAll('img').length,document.querySelectorAll('script').length,\
        document.querySelectorAll('[data-at]').length]";
    let Some(found) = probe(&at.join("report.html"), 1200, count) else { return };
    // The scripts are the page's own, the one that collects errors, and the probe.
    assert_eq!(found, json!([0, 3, 0]));
    let found = probe(&at.join("inspect.html"), 1200, count).unwrap();
    assert_eq!((&found[0], &found[1]), (&json!(0), &json!(4)));
    assert!(found[2].as_u64().unwrap() > 100, "tokens are drawn: {found}");
}

#[test]
fn the_terminal_has_colours_only_where_they_are_wanted() {
    let at = RUN.path();
    let mut piped = Command::new(env!("CARGO_BIN_EXE_stapo"));
    piped.current_dir(at).args(["inspect", "run", "--step", "2", "--terminal"]).env_remove("CLICOLOR_FORCE");
    let plain = ok(&piped.output().unwrap());
    assert!(plain.contains("[-") && plain.contains("silenced  p ") && !plain.contains('\u{1b}'), "{plain}");
    let run = |key: &str, by: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(at).args(["inspect", "run", "--step", "2", "--terminal", "--by", by]);
        ok(&command.env_remove("NO_COLOR").env("CLICOLOR_FORCE", "1").env(key, "1").output().unwrap())
    };
    for by in ["fate", "probability", "entropy", "advantage", "ratio", "gradient-norm"] {
        assert!(run("CLICOLOR_FORCE", by).contains("\u{1b}[38;2;"), "{by}");
    }
    assert!(!run("NO_COLOR", "fate").contains('\u{1b}'));
}

/// An experiment of two arms with two seeds each, invented benchmark results, and an arm that failed.
pub fn experiment(at: &Path) {
    let mut arms = Vec::new();
    for (name, objective) in [("stapo", STAPO), ("justrl", r#"{preset="justrl"}"#)] {
        for seed in 0..2u64 {
            let run = format!("{name}-{seed}");
            train(at, &format!("exp/{run}"), objective, seed);
            arms.push(json!({"name": name, "seed": seed, "run": run, "settings": [format!("seed={seed}")]}));
            let sample = |question: usize, sample: u64| {
                // One of two samples is right: on every question for the method, on every second one for the baseline.
                let is_right = sample == 0 && (name == "stapo" || question.is_multiple_of(2));
                json!({"schema": 1, "benchmark": "amc23", "decoding": "T = 1.0", "problem_id": format!("q{question}"),
                    "sample_idx": sample, "text": "x", "n_tokens": 10, "finish": {"kind": "stop", "token": 2}, "answer": null,
                    "verdict": if is_right { "right" } else { "no_answer" }, "reason": "made up"})
            };
            let places = (0..8).flat_map(|question| [(question, 0), (question, 1)]);
            let eval = json_lines(places.map(|(question, idx)| sample(question, idx)));
            let folder = at.join("exp").join(&run).join(if seed == 0 { "eval" } else { "eval/later" });
            std::fs::create_dir_all(&folder).unwrap();
            // The first sample is written twice and must count once.
            std::fs::write(folder.join("samples.jsonl"), eval.clone() + eval.lines().next().unwrap())
                .unwrap();
        }
    }
    arms.push(json!({"name": "grpo", "seed": 0, "run": "grpo-0", "settings": [], "error": "out of memory"}));
    let summary = json!({"schema": 1, "name": "quick", "method": "stapo", "arms": arms});
    std::fs::write(at.join("exp/experiment.json"), summary.to_string()).unwrap();
}

#[test]
fn a_report_on_an_experiment_compares_its_arms() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    experiment(at);
    ok(&stapo(
        at,
        &[
            "report",
            "exp",
            "--csv",
            "csv",
            "--tensorboard",
            "tb",
            "--png",
            "one.png",
            "--figure",
            "benchmarks-t---1-0",
        ],
    ));
    let html = read(at.join("exp/report.html"));
    assert_self_contained(&html);
    for part in
        ["grpo, seed 0: out of memory", "+11.49 %", "+3.73 %", "too few seeds to say", "mean of 2 seeds"]
    {
        assert!(html.contains(part), "no {part}");
    }
    // 8 questions: 50 % each against 25 % on average; the gain is 100 %.
    let benchmarks = read(at.join("csv/benchmarks.csv"));
    assert!(
        benchmarks.contains("amc23,stapo,50.0 (") && benchmarks.contains("amc23,justrl,25.0 ("),
        "{benchmarks}"
    );
    assert!(read(at.join("csv/standings.csv")).contains("average,,,+100.00 %"));
    assert_eq!(read(at.join("csv/metrics.csv")).lines().count(), 1 + 4 * 4);
    assert_eq!(at.join("tb").read_dir().unwrap().count(), 4);
    assert!(std::fs::read(at.join("one.png")).unwrap().starts_with(b"\x89PNG"));
    if let Some(found) = probe(&at.join("exp/report.html"), 1200, DRAWN) {
        assert_drawn(&found);
        assert!(found["names"].to_string().contains("entropy-quantiles-justrl"), "{found}");
    }
    let outside = read(at.join("exp/experiment.json")).replace("\"stapo-0\"", "\"../elsewhere\"");
    std::fs::write(at.join("exp/experiment.json"), outside).unwrap();
    assert!(complaint(at, &["report", "exp"]).contains("is not a folder below it"));
}

/// Sum over the tokens of the responses of one mini-batch.
fn summed(responses: &[Value], update: u64, of: &dyn Fn(&Value, usize) -> f64) -> f64 {
    let own = responses.iter().filter(|r| r["update_idx"] == update);
    own.flat_map(|r| (0..r["tokens"]["id"].as_array().unwrap().len()).map(move |t| of(r, t))).sum()
}

#[test]
fn what_a_step_tells_follows_from_its_tokens() {
    let run = RUN.path().join("run");
    let metrics = lines(run.join("metrics.jsonl"))[3].clone();
    let responses = lines(run.join("rollouts/step-000004.jsonl"));
    let number = |r: &Value, column: &str, t: usize| r["tokens"][column][t].as_f64().unwrap();
    let one = |update| summed(&responses, update, &|_, _| 1.0);
    let entropy = |update| summed(&responses, update, &|r, t| number(r, "entropy", t));
    let is_kept = |r: &Value, t: usize| f64::from(u8::from(r["tokens"]["kept"][t].as_bool().unwrap()));
    // The first mini-batch is on policy: the rollout's entropy sum less the first mini-batch's is the second one's when
    // sampled.
    let n_tokens = metrics["n_tokens"].as_f64().unwrap();
    assert_eq!(one(0) + one(1), n_tokens);
    let sampled = metrics["entropy_mean"].as_f64().unwrap() * n_tokens - entropy(0);
    let measured = (entropy(1) - sampled) / one(1);
    let recorded = &metrics["entropy_change"];
    assert!(
        (recorded["measured"].as_f64().unwrap() - measured).abs() < 1e-9,
        "{recorded} against {measured}"
    );
    let pushed = summed(&responses, 0, &|r, t| {
        let logp = number(r, "logp", t);
        let entropy = number(r, "entropy", t);
        is_kept(r, t) * -logp.exp() * (logp + entropy) * (1.0 - logp.exp()) * number(r, "weight", t)
    });
    // Warm-up has ended before this step, so both optimizer steps have the same learning rate.
    let predicted = metrics["learning_rate"].as_f64().unwrap() * pushed / summed(&responses, 0, &is_kept);
    assert!(
        (recorded["predicted"].as_f64().unwrap() / predicted - 1.0).abs() < 1e-6,
        "{recorded} against {predicted}"
    );
    let count = |part: &str| {
        let path = run.join(part).join("step-000004.jsonl");
        if path.exists() { lines(path).len() } else { 0 }
    };
    assert_eq!(metrics["n_silenced"], count("tokens"));
    assert_eq!(metrics["n_candidates"], count("tokens") + count("explored"));
    assert!(count("explored") > 0);
}

#[test]
fn what_is_not_there_is_named() {
    let at = RUN.path();
    std::fs::create_dir_all(at.join("empty")).unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["report", "nowhere"], "no such folder"),
        (&["report", "empty"], "no plan.toml"),
        (&["inspect", "empty"], "no plan.toml"),
        (&["inspect", "run", "--step", "3"], "hint: steps 1, 2, 4"),
        (
            &["report", "run", "-o", "x.html", "--png", "x.png", "--figure", "entropi"],
            "hint: overview, held-out-accuracy",
        ),
    ];
    for (args, expected) in cases {
        let said = complaint(at, args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert!(
        !at.join("x.html").exists(),
        "a figure that does not exist is refused before anything is written"
    );
    // Step 4 is the last with responses; the last with a silenced token is shown.
    let silenced =
        at.join("run/tokens").read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let recorded = |name: &String| at.join("run/rollouts").join(name).exists();
    let last = silenced.filter(recorded).max().unwrap();
    let said = ok(&stapo(at, &["inspect", "run", "--terminal"]));
    let step: u64 = last.trim_start_matches("step-").trim_end_matches(".jsonl").parse().unwrap();
    assert!(said.starts_with(&format!("run, step {step}:")), "{said}");
}

#[test]
fn a_run_that_has_only_begun_and_a_damaged_one_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for run in ["begun", "damaged"] {
        std::fs::create_dir_all(at.join(run).join("rollouts")).unwrap();
        std::fs::copy(RUN.path().join("run/plan.toml"), at.join(run).join("plan.toml")).unwrap();
        std::fs::write(at.join(run).join("metrics.jsonl"), "").unwrap();
    }
    ok(&stapo(at, &["report", "begun", "--csv", "csv", "--png", "png", "--tensorboard", "tb"]));
    assert!(read(at.join("begun/report.html")).contains("No step has been finished yet."));
    let mut response = lines(RUN.path().join("run/rollouts/step-000002.jsonl"))[0].clone();
    response["tokens"]["entropy"] = json!([0.5]);
    std::fs::write(at.join("damaged/rollouts/step-000002.jsonl"), json_lines([response].into_iter()))
        .unwrap();
    for command in ["report", "inspect"] {
        let said = complaint(at, &[command, "damaged"]);
        assert!(said.contains("response 1: column entropy has 1 entries"), "{said}");
    }
}
