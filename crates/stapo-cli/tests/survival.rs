//! Steps until collapse, as `stapo report` compares the arms of an experiment by them.

use crate::browser::runs::{STAPO, json_lines, read, train};
use crate::common::{ok, stapo};
use serde_json::{Value, json};

/// An arm whose runs hold longer than the method's says nothing of a third arm, and the claim names each pair.
#[test]
fn collapses_are_compared_method_by_method() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "run", STAPO, 0);
    let line: Value =
        serde_json::from_str(read(at.join("run/metrics.jsonl")).lines().next().unwrap()).unwrap();
    let mut arms = Vec::new();
    for (name, holds) in [("stapo", false), ("like", false), ("holds", true)] {
        for seed in 0..5u64 {
            let run = at.join("exp").join(format!("{name}-{seed}"));
            std::fs::create_dir_all(&run).unwrap();
            std::fs::copy(at.join("run/plan.toml"), run.join("plan.toml")).unwrap();
            // Ten steps, then fifteen without a right answer where the run collapses; no two runs of an arm at one step.
            let steps = (1..=25 + seed).map(|step| {
                let mut metrics = line.clone();
                metrics["step"] = step.into();
                metrics["accuracy"] = if holds || step <= 10 + seed { 0.8 } else { 0.0 }.into();
                metrics
            });
            std::fs::write(run.join("metrics.jsonl"), json_lines(steps)).unwrap();
            let settings = [format!("seed={seed}")];
            arms.push(
                json!({"name": name, "seed": seed, "run": format!("{name}-{seed}"), "settings": settings}),
            );
        }
    }
    let claim = |arms: &[Value]| {
        let experiment = json!({"schema": 1, "name": "made up", "method": "stapo", "arms": arms});
        std::fs::write(at.join("exp/experiment.json"), experiment.to_string()).unwrap();
        ok(&stapo(at, &["report", "exp", "--csv", "csv"]));
        let claims = read(at.join("csv/claims.csv"));
        claims.lines().find(|line| line.contains("prevents collapse")).unwrap().to_string()
    };
    let said = claim(&arms);
    assert!(
        said.contains("contradicted here") && said.contains("like 5 of 5 (p 1), holds 0 of 5 (p 0.0"),
        "{said}"
    );
    let pairs = read(at.join("csv/survival-pairs.csv"));
    let row =
        |start: &str| pairs.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{pairs}"));
    assert!(row("like,accuracy").starts_with("like,accuracy,5 of 5,5.0,5 of 5,1,1"), "{pairs}");
    assert!(
        row("holds,accuracy").contains("5 of 5,1.") && row("holds,accuracy").contains(",0 of 5,0.0"),
        "{pairs}"
    );
    for calm in ["holds,entropy", "holds,endings"] {
        assert!(row(calm).ends_with(",0 of 5,0.0,0 of 5,1,1"), "{pairs}");
    }
    // Two of the six pairs have a collapse, and the adjustment is for those.
    let p: Vec<f64> = row("holds,accuracy").rsplit(',').take(2).map(|p| p.parse().unwrap()).collect();
    assert!((p[0] / p[1] - 2.0).abs() < 0.01, "{pairs}");
    arms.retain(|arm| arm["name"] != "holds");
    let said = claim(&arms);
    assert!(said.contains("undecided here"), "{said}");
}
