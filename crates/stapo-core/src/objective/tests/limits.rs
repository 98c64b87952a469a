//! Values exactly at a limit, and errors that name the first bad token.

use super::*;

fn spec(overrides: &[&str]) -> ObjectiveSpec {
    let plain = ["masks=[]", "surrogate={kind=\"unclipped\"}"];
    let all = plain.iter().chain(overrides).copied();
    ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(all).unwrap()
}

fn moved(advantage: f64, logp: f64, behavior_logp: f64) -> Sample {
    let apart = vec![behavior_logp];
    Sample {
        behavior_logp: apart.clone(),
        sampler_logp: apart,
        ..Sample::on_policy(advantage, &[logp], &[1.0])
    }
}

#[test]
fn a_log_ratio_at_its_bound_still_has_a_derivative() {
    let held = spec(&["ratio={kind=\"token\",max_log_ratio=0.5}"]);
    for (logp, is_zero) in [(-1.0, false), (-0.75, true)] {
        let (_, effects) = run(&held, &[moved(1.0, logp, -1.5)], UpdateKey::default()).unwrap();
        assert_eq!(effects[0][0].d_logp == 0.0, is_zero, "{logp}");
    }
}

#[test]
fn a_drift_at_its_bound_silences_nothing() {
    for (delta, is_silenced) in [("0.5", false), ("0.499", true)] {
        let mask = format!("masks=[{{kind=\"off_policy_sequence\",delta={delta}}}]");
        let (tally, _) = run(&spec(&[&mask]), &[moved(-1.0, -1.5, -1.0)], UpdateKey::default()).unwrap();
        assert_eq!(tally.n_kept == 0, is_silenced, "{delta}");
    }
}

#[test]
fn a_loss_that_is_not_finite_names_its_first_token() {
    let mut sample = Sample::on_policy(0.0, &[-1.0, -1.0, -1.0], &[1.0; 3]);
    sample.behavior_logp = vec![-1.0, -3.0, -3.0];
    sample.advantage = Advantages::Tokens(vec![1.0, 1.0, 1e308]);
    let error = run(&spec(&[]), &[sample], UpdateKey::default()).unwrap_err();
    assert!(matches!(error, ObjectiveError::NotFinite { token_idx: 2, what: "loss", .. }), "{error}");
}

#[test]
fn settings_at_their_limits_are_taken_or_refused() {
    let checked = |overrides: &[&str]| {
        let all = overrides.iter().copied();
        ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(all).and_then(|spec| {
            spec.check()?;
            Ok(())
        })
    };
    assert!(checked(&["masks=[{kind=\"top_entropy\",share=1.0}]"]).is_ok());
    assert!(checked(&["masks=[{kind=\"top_entropy\",share=0.0}]"]).is_err());
    assert!(checked(&["masks=[{kind=\"top_entropy\",share=1.1}]"]).is_err());
    let cov =
        |low: f64, high: f64| format!("masks=[{{kind=\"clip_cov\",share=0.1,low={low:?},high={high:?}}}]");
    assert!(checked(&[&cov(1.0, 1.5)]).is_ok());
    assert!(checked(&[&cov(1.0, 1.0)]).is_err());
}
