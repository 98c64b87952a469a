use super::*;

#[derive(Deserialize)]
struct Golden {
    center_coefficient: f64,
    scores: Vec<[f64; 2]>,
    margins: Vec<f64>,
    value: f64,
    d_scores: Vec<[f64; 2]>,
}

#[test]
fn the_loss_and_its_derivatives_are_those_of_autograd() {
    let file: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/goldens/reward_models.json")).unwrap();
    let cases: Vec<Golden> = serde_json::from_value(file["cases"].clone()).unwrap();
    assert_eq!(cases.len(), 4);
    let close = |ours: f64, theirs: f64| (ours - theirs).abs() <= 1e-12 * theirs.abs().max(1e-3);
    for case in &cases {
        let spec = RankingSpec { center_coefficient: case.center_coefficient };
        let pairs = case.scores.iter().zip(&case.margins);
        let effects: Vec<PairEffect> =
            pairs.map(|(&[chosen, rejected], &margin)| spec.evaluate(chosen, rejected, margin)).collect();
        let n = effects.len() as f64;
        let loss = effects.iter().map(|effect| effect.loss).sum::<f64>() / n;
        assert!(close(loss, case.value), "{loss} {}", case.value);
        for (effect, theirs) in effects.iter().zip(&case.d_scores) {
            assert!(close(effect.d_chosen / n, theirs[0]), "{effect:?} {theirs:?}");
            assert!(close(effect.d_rejected / n, theirs[1]), "{effect:?} {theirs:?}");
        }
    }
}

#[test]
fn a_loss_far_from_0_is_finite() {
    let spec = RankingSpec::default();
    for lead in [-1e6, 1e6] {
        let effect = spec.evaluate(lead, 0.0, 0.0);
        assert!(effect.loss.is_finite() && effect.d_chosen.is_finite(), "{effect:?}");
    }
    let is_possible = |center_coefficient| RankingSpec { center_coefficient }.is_possible();
    assert_eq!([0.0, 0.01, -0.1, f64::NAN].map(is_possible), [true, true, false, false]);
}

fn rewards(groups: &[Vec<Option<f64>>], normalise: Normalise, moments: &mut ScoreMoments) -> Vec<Vec<f64>> {
    rewards_of_scores(groups, normalise, 1.5, moments)
}

#[test]
fn a_group_is_measured_against_itself() {
    let groups = [vec![Some(1.0), Some(3.0)], vec![Some(7.0); 3], vec![Some(0.0), None, Some(10.0)]];
    let mut moments = ScoreMoments::default();
    let found = rewards(&groups, Normalise::Group, &mut moments);
    assert_eq!(found, [vec![-1.0, 1.0], vec![0.0; 3], vec![-1.0, -1.5, 1.0]]);
    assert_eq!(moments, ScoreMoments::default());
}

/// The moments after two steps are those of all scores at once, and a step that continues from stored moments has its rewards.
#[test]
fn running_moments_go_on_from_where_they_were_stored() {
    let steps = [[vec![Some(1.0), Some(2.0)]], [vec![Some(4.0), Some(9.0)]]];
    let mut through = ScoreMoments::default();
    let first = rewards(&steps[0], Normalise::Running, &mut through);
    assert_eq!(first, [[-1.0, 1.0]]);
    let stored = serde_json::to_string(&through).unwrap();
    let second = rewards(&steps[1], Normalise::Running, &mut through);
    let mut resumed: ScoreMoments = serde_json::from_str(&stored).unwrap();
    assert_eq!(rewards(&steps[1], Normalise::Running, &mut resumed), second);
    assert_eq!(resumed, through);
    assert!((through.mean() - 4.0).abs() < 1e-12);
    // 9 lies 5 / sqrt(9.5) above the mean, which is clipped.
    assert_eq!(second, [[0.0, 1.5]]);
}

#[test]
fn plain_scores_are_only_clipped() {
    let found = rewards(&[vec![Some(-9.0), Some(0.25), None]], Normalise::None, &mut ScoreMoments::default());
    assert_eq!(found, [[-1.5, 0.25, -1.5]]);
}
