//! The pages' script for S2T against the cases that `stapo-core` decided, in Node.js and in Chromium.

use crate::browser::probe;
use serde_json::Value;
use std::io::Write;
use std::process::Command;

const SCRIPT: &str = include_str!("../src/shared/viewer/s2t.js");
const CASES: &str = include_str!("../../stapo-core/tests/goldens/s2t.json");

/// The fates by the script, spelled as in the cases, and its thresholds.
const DECIDE: &str = "cases.cases.map(({mask})=>{const found=stapo.s2t.decide(cases.minibatch,mask);\
    return {problem:stapo.s2t.problem(mask),tau_h:found.tauH,fates:cases.minibatch.map((r,i)=>r.logp.map((_,t)=>\
    found.silenced[i][t]?'2':found.candidates[i][t]?'1':'0').join(''))}})";

fn assert_decisions(decided: &Value) {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let (cases, decided) = (cases["cases"].as_array().unwrap(), decided.as_array().unwrap());
    assert_eq!(cases.len(), decided.len());
    for (case, decided) in cases.iter().zip(decided) {
        assert!(decided["problem"].is_null(), "{case}: {decided}");
        assert_eq!(case["fates"], decided["fates"], "{case}");
        assert_eq!(case["tau_h"].as_f64(), decided["tau_h"].as_f64(), "{case}");
    }
}

/// The value of an expression after the script, in Node.js. Returns `None`, and prints the reason, on machines without it.
fn in_node(expression: &str) -> Option<Value> {
    let script = format!(
        "const stapo={{}};{SCRIPT}\nconst cases={CASES};process.stdout.write(JSON.stringify({expression}))"
    );
    match Command::new("node").args(["-e", &script]).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(serde_json::from_slice(&output.stdout).unwrap())
        }
        Err(error) => {
            // Written to standard error directly, which the test harness does not capture.
            let _ = writeln!(std::io::stderr(), "skipped, the viewer's rule was not run in node: {error}");
            None
        }
    }
}

#[test]
fn the_viewer_decides_as_core_does_in_node() {
    if let Some(decided) = in_node(DECIDE) {
        assert_decisions(&decided);
    }
}

#[test]
fn the_viewer_decides_as_core_does_in_a_browser() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("cases.html");
    let html = format!(
        "<title></title><body><script>const stapo={{}};{SCRIPT}\nconst cases={CASES}</script></body>"
    );
    std::fs::write(&page, html).unwrap();
    if let Some(decided) = probe(&page, 1200, DECIDE) {
        assert_decisions(&decided);
    }
}

#[test]
fn what_the_viewer_cannot_compute_it_says() {
    let masks = "[['random','candidates','tau_p'],['full','some_tokens','tau_p'],['low_entropy','candidates','rank'],\
        ['low_entropy','rewarded_tokens','surprise']].map(([select,quantile_over,kind])=>\
        stapo.s2t.problem({select,quantile_over,q:0.5,threshold:{kind}}))";
    let Some(said) = in_node(masks) else { return };
    for (said, word) in said.as_array().unwrap().iter().zip(["at random", "some_tokens", "rank"]) {
        assert!(said.as_str().unwrap().contains(word), "{said}");
    }
    assert!(said[3].is_null());
}
