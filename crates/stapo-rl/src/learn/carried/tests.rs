use super::*;

const REUSE: Reuse = Reuse { max: 4, gate: Gate::LmHead, tau: 0.5, window: 4 };

/// The judgements of energies that are all of the second use.
fn judged(reuse: &Reuse, energies: &[f64]) -> Vec<ReusedUpdate> {
    let mut window = EnergyWindow::default();
    energies.iter().map(|&energy| window.judge(reuse, 1, energy)).collect()
}

/// A window of the increments 1, -1, 2, -1.
fn full_window() -> EnergyWindow {
    EnergyWindow { last: Some(2.0), increments: VecDeque::from([1.0, -1.0, 2.0, -1.0]) }
}

#[test]
fn the_z_score_compares_an_increment_with_the_window_before_it() {
    let energies = [1.0, 2.0, 1.0, 3.0, 2.0, 4.0, 4.5];
    let found = judged(&REUSE, &energies);
    assert!(found[..5].iter().all(|update| update.z.is_none()), "the window of 4 increments is not full");
    let expected = |increments: [f64; 4], next: f64| {
        let mean = increments.iter().sum::<f64>() / 4.0;
        let variance = increments.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 3.0;
        (next - mean) / variance.sqrt()
    };
    assert_eq!(found[5].z, Some(expected([1.0, -1.0, 2.0, -1.0], 2.0)));
    assert_eq!(found[6].z, Some(expected([-1.0, 2.0, -1.0, 2.0], 0.5)), "the window slides");
    assert!(found[5].gated && !found[6].gated);
}

#[test]
fn the_gate_closes_above_tau_and_never_in_the_first_use() {
    let window = full_window();
    let at = |reuse: &Reuse, use_idx: usize, energy: f64| window.clone().judge(reuse, use_idx, energy);
    let z = at(&REUSE, 1, 9.0).z.unwrap();
    assert!(z > 0.5 && at(&REUSE, 1, 9.0).gated && at(&REUSE, 3, 9.0).gated);
    assert!(!at(&REUSE, 0, 9.0).gated, "the first use is never discarded");
    assert!(!at(&Reuse { tau: z, ..REUSE }, 1, 9.0).gated, "z must be above tau");
    assert!(!at(&REUSE, 1, 0.0).gated, "a falling energy is no sign of collapse");
    let fixed = at(&Reuse { gate: Gate::None, ..REUSE }, 1, 9.0);
    assert_eq!((fixed.gated, fixed.z), (false, Some(z)), "fixed reuse records what the gate would have seen");
}

#[test]
fn increments_without_spread_and_energies_without_end_have_no_z_score() {
    assert!(judged(&REUSE, &[1.0; 8]).iter().all(|update| update.z.is_none() && !update.gated));
    let mut window = full_window();
    let before = window.clone();
    for energy in [f64::INFINITY, f64::NAN] {
        assert!(!window.judge(&REUSE, 1, energy).gated);
        assert_eq!(window, before, "the window holds finite numbers");
    }
}

#[test]
fn the_state_survives_a_checkpoint_to_the_bit_and_damage_is_named() {
    let overrides = ["update.reuse={max=4}", "objective.entropy_bonus={kind=\"target\"}"];
    let config = crate::Config::from_toml("", overrides).unwrap();
    let plan = Plan::resolve(config).unwrap();
    let mut carried = Carried::default();
    for k in 1..6 {
        carried.energies.judge(&REUSE, 0, 1.0 / f64::from(k));
    }
    carried.controls.entropy_coefficient = Some(0.1 + 0.2);
    let mut state = LoopState::new();
    carried.write(&plan, &mut state);
    assert_eq!(Carried::read(&state).unwrap(), carried);
    state.insert(ENERGIES.to_string(), "{\"last\":".to_string());
    let said = Carried::read(&state).unwrap_err().to_string();
    assert!(said.contains("energies"), "{said}");
    let plain = Plan::resolve(crate::Config::default()).unwrap();
    let mut state = LoopState::new();
    carried.write(&plain, &mut state);
    assert!(state.is_empty(), "a run without these settings keeps its state hash");
}

/// Only moments that the next step reads belong to the state of a run.
#[test]
fn moments_of_scores_are_carried_where_rewards_are_measured_against_the_run() {
    let mut moments = ScoreMoments::default();
    stapo_core::reward_model::rewards_of_scores(
        &[vec![Some(1.0), Some(4.0)]],
        Normalise::Running,
        10.0,
        &mut moments,
    );
    assert_ne!(moments, ScoreMoments::default());
    for (normalise, is_carried) in [("running", true), ("group", false), ("none", false)] {
        let verifier =
            format!("task.verifier={{kind=\"reward-model\",model=\"m\",normalise=\"{normalise}\"}}");
        let plan = Plan::resolve(crate::Config::from_toml("", [verifier.as_str()]).unwrap()).unwrap();
        let mut state = LoopState::new();
        Carried { scores: moments, ..Carried::default() }.write(&plan, &mut state);
        let expected = if is_carried { moments } else { ScoreMoments::default() };
        assert_eq!(Carried::read(&state).unwrap().scores, expected, "{normalise}");
        assert_eq!(state.is_empty(), !is_carried, "{normalise}");
    }
}
