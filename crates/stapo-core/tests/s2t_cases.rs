//! S2T's decisions on small mini-batches, under every kind of threshold, quantile and selection. The token viewer's
//! script and `python/stapo/torch.py` implement the rule again, and their tests read the same cases from
//! `goldens/s2t.json`.

use serde_json::{Value, json};
use stapo_core::minibatch::{ResponseColumns, evaluate};
use stapo_core::objective::{
    AdvantagesRef, Mask, ObjectiveError, ObjectiveSpec, QuantileOver, Select, Threshold, UpdateKey,
    influence, logp_below,
};
use stapo_core::random::Key;
use std::path::Path;

struct Response {
    /// One for the whole response, or one per token.
    advantages: Vec<f64>,
    logp: Vec<f64>,
    entropy: Vec<f64>,
    collision: Vec<f64>,
}

impl Response {
    fn advantage(&self) -> AdvantagesRef<'_> {
        match self.advantages.as_slice() {
            [advantage] => AdvantagesRef::Response(*advantage),
            advantages => AdvantagesRef::Tokens(advantages),
        }
    }

    fn to_json(&self) -> Value {
        let is_single = self.advantages.len() == 1;
        let influence: Vec<f64> =
            self.logp.iter().zip(&self.collision).map(|(logp, sum)| influence(*logp, *sum)).collect();
        json!({
            "advantage": if is_single { self.advantages[0] } else { 0.0 },
            "advantages": if is_single { &[][..] } else { &self.advantages },
            "logp": self.logp, "entropy": self.entropy, "influence": influence,
        })
    }
}

/// Six responses of few and of many tokens. Entropies are multiples of 1/4, so that many are equal to a quantile; one
/// log-prob is exactly ln 0.05.
fn minibatch() -> Vec<Response> {
    let uniform = |response: u64, token: u64, column: u64| {
        let bits = Key::new(37).with(response).with(token).with(column).bits();
        (bits >> 40) as f64 / f64::from(1u32 << 24)
    };
    let advantages: [&[f64]; 6] = [&[1.25], &[-0.5], &[0.5], &[0.0], &[], &[0.75]];
    let response = |(response, (&given, n_tokens)): (usize, (&&[f64], u64))| {
        let column = |column: u64, value: &dyn Fn(f64) -> f64| -> Vec<f64> {
            (0..n_tokens).map(|t| value(uniform(response as u64, t, column))).collect()
        };
        let mut logp = column(0, &|u| (-64.0 * (8.0 * u * u)).round() / 64.0);
        if response == 0 {
            logp[1] = logp_below(0.05);
        }
        Response {
            advantages: if given.is_empty() {
                column(3, &|u| (8.0 * u).round() - 4.0)
            } else {
                given.to_vec()
            },
            logp,
            entropy: column(1, &|u| (12.0 * u).round() / 4.0),
            collision: column(2, &|u| (64.0 * u).round() / 64.0),
        }
    };
    advantages.iter().zip([5, 3, 12, 4, 9, 1]).enumerate().map(response).collect()
}

fn masks() -> Vec<Mask> {
    let thresholds = [
        (0.05, Threshold::TauP),
        (1e-9, Threshold::TauP),
        (0.05, Threshold::TargetShare { share: 0.4 }),
        (0.05, Threshold::Surprise { c: 0.5, b: 0.75 }),
        (0.05, Threshold::Influence { kappa: 0.6, vocabulary: None }),
        (0.05, Threshold::Influence { kappa: 0.75, vocabulary: Some(17) }),
    ];
    let scopes = [QuantileOver::Candidates, QuantileOver::AllTokens, QuantileOver::RewardedTokens];
    let mut masks = Vec::new();
    for (tau_p, threshold) in thresholds {
        for quantile_over in scopes {
            for (select, q) in
                [(Select::LowEntropy, 0.75), (Select::HighEntropy, 0.6), (Select::LowEntropy, 1.0)]
            {
                masks.push(Mask::Spurious { tau_p, threshold, q, select, quantile_over, seed: 0 });
            }
        }
        let quantile_over = QuantileOver::Candidates;
        masks.push(Mask::Spurious { tau_p, threshold, q: 0.5, select: Select::Full, quantile_over, seed: 0 });
    }
    masks
}

/// What core decides on the mini-batch under a mask.
fn decided(minibatch: &[Response], mask: Mask) -> Value {
    let columns = minibatch.iter().map(|r| {
        let columns = ResponseColumns {
            logp: &r.logp,
            behavior_logp: &r.logp,
            entropy: &r.entropy,
            reference_logp: None,
            behavior_entropy: None,
            sampler_logp: None,
            collision: Some(&r.collision),
            teacher_logp: None,
        };
        (columns, r.advantage())
    });
    let columns: Vec<_> = columns.collect();
    let spec =
        ObjectiveSpec { masks: vec![mask], ..ObjectiveSpec::from_preset("stapo").expect("a known preset") };
    // Token by token: 0 for a token that is no candidate, 1 for a candidate that is kept, 2 for a silenced token.
    let mut fates: Vec<String> = Vec::new();
    let (_, totals) = evaluate::<ObjectiveError>(&spec, &columns, UpdateKey::default(), |_, effects| {
        let fate = |effect: &stapo_core::objective::TokenEffect| match (effect.is_candidate, effect.kept) {
            (false, _) => '0',
            (true, true) => '1',
            (true, false) => '2',
        };
        assert!(
            effects.iter().all(|effect| effect.kept || effect.is_candidate),
            "S2T silences candidates only"
        );
        fates.push(effects.iter().map(fate).collect());
        Ok(())
    })
    .unwrap();
    let Mask::Spurious { tau_p, threshold, .. } = mask else { panic!("an S2T mask") };
    let mut described = serde_json::to_value(mask).unwrap();
    described["logp_below"] = json!(logp_below(tau_p));
    described["curvature"] = json!(threshold.curvature());
    json!({"mask": described, "tau_h": totals.tau_h, "fates": fates})
}

#[test]
fn the_committed_cases_are_what_core_decides() {
    let minibatch = minibatch();
    let cases: Vec<Value> = masks().into_iter().map(|mask| decided(&minibatch, mask)).collect();
    let fates = |case: &Value| {
        case["fates"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect::<String>()
    };
    let mut distinct: Vec<String> = cases.iter().map(fates).collect();
    assert!(distinct.iter().any(|fates| !fates.contains(['1', '2'])), "a case without candidates");
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() > 20, "cases that agree show nothing: {} differ", distinct.len());
    let responses: Vec<Value> = minibatch.iter().map(Response::to_json).collect();
    let lines: Vec<String> = cases.iter().map(Value::to_string).collect();
    let text = format!("{{\"minibatch\": {},\n\"cases\": [\n{}\n]}}\n", json!(responses), lines.join(",\n"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/s2t.json");
    if std::env::var_os("STAPO_WRITE_CASES").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "goldens/s2t.json is not what core decides; STAPO_WRITE_CASES=1 writes it anew, and the viewer and \
         python/stapo/torch.py must follow"
    );
}
