use super::super::file_texts::FileTexts;
use super::super::judged::JudgedLayout;
use super::super::preference::Reference;
use super::super::reference;
use super::*;
use stapo_core::preference::Side;

fn pairs(n: usize) -> Vec<Value> {
    (0..n)
        .map(|i| {
            let wrong = 2 * i + if i % 2 == 0 { 10 } else { 1 };
            json!({"prompt": format!("{i}+{i}="), "chosen": format!("{}", 2 * i), "rejected": format!("{wrong}")})
        })
        .collect()
}

/// A run that is ready for its first step, with its reference in `folder`.
fn open_pairs(folder: &Path, rows: &[Value], settings: &[&str]) -> Result<(PretrainConfig, Pretrainer)> {
    let set = [&["steps=50", "update.batch_rows=4", "update.learning_rate=1e-4"], settings].concat();
    let (config, mut pretrainer) = open_with(&PretrainConfig::preferring(), folder, rows, &set)?;
    config.check()?;
    pretrainer.open_reference(&config, folder)?;
    Ok((config, pretrainer))
}

/// The curves of TRL's trainers on the same model and rows.
#[test]
fn losses_rewards_and_gradient_norms_follow_those_of_trl() {
    let file: Value =
        serde_json::from_str(include_str!("../../../../tests/goldens/preference_curves.json")).unwrap();
    let curves = file["curves"].as_array().unwrap();
    assert_eq!(curves.len(), 4);
    for curve in curves {
        let folder = tempfile::tempdir().unwrap();
        let rows = curve["rows"].as_array().unwrap();
        let loss = curve["loss"].as_str().unwrap();
        let kind = format!("preference.loss.kind={loss}");
        let batch = format!("update.batch_rows={}", rows.len());
        let settings = [kind.as_str(), batch.as_str(), "update.schedule={kind=\"constant\"}"];
        let (config, mut pretrainer) = open_pairs(folder.path(), rows, &settings).unwrap();
        for (step, theirs) in curve["steps"].as_array().unwrap().iter().enumerate() {
            let ours = pretrainer.step(&config).unwrap();
            let preference = ours.preference.unwrap();
            let compared = [
                ("loss", ours.loss),
                ("gradient_norm", ours.gradient_norm),
                ("reward_chosen", preference.reward_chosen),
                ("reward_rejected", preference.reward_rejected),
            ];
            // TRL logs sums of log-ratios as rewards of IPO, whose loss compares means.
            for (key, ours) in
                compared.into_iter().filter(|(key, _)| loss != "ipo" || !key.starts_with("reward"))
            {
                let theirs = theirs[key].as_f64().unwrap();
                let near = (ours - theirs).abs() <= 2e-5 * theirs.abs().max(1.0);
                assert!(near, "{loss} step {}: {key} {ours}, TRL {theirs}", step + 1);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_microbatch() {
    let mask = "preference.masks=[{kind=\"spurious\",tau_p=0.2}]";
    for kind in ["dpo", "ipo", "simpo", "orpo", "kto"] {
        let run = |microbatch: &str| {
            let folder = tempfile::tempdir().unwrap();
            let kind = format!("preference.loss.kind={kind}");
            let (config, mut pretrainer) =
                open_pairs(folder.path(), &pairs(12), &[&kind, mask, microbatch]).unwrap();
            let metrics: Vec<PretrainMetrics> = (0..3).map(|_| pretrainer.step(&config).unwrap()).collect();
            assert!(metrics.iter().any(|step| step.preference.unwrap().n_silenced > 0), "{kind}: no mask");
            (metrics[2].loss.to_bits(), pretrainer.learner.state_hash().unwrap())
        };
        assert_eq!(run("update.microbatch_tokens=24"), run("update.microbatch_tokens=8192"), "{kind}");
    }
}

#[test]
fn the_reference_is_the_start_whether_stored_or_the_base_of_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let (config, mut full) = open_pairs(folder.path(), &pairs(8), &["data.held_out_share=0.3"]).unwrap();
    assert!(matches!(full.reference, Reference::Stored(_)));
    let (lora_config, mut adapted) =
        open_pairs(folder.path(), &pairs(8), &["data.held_out_share=0.3", "model.lora={rank=4}"]).unwrap();
    assert!(matches!(adapted.reference, Reference::Base));
    for (config, pretrainer) in [(&config, &mut full), (&lora_config, &mut adapted)] {
        let first = pretrainer.step(config).unwrap();
        assert!((first.loss - std::f64::consts::LN_2).abs() < 1e-15, "{}", first.loss);
        assert_eq!(first.preference.unwrap().reward_chosen, 0.0, "the same bits");
        for _ in 0..3 {
            pretrainer.step(config).unwrap();
        }
        let spec = config.preference.as_ref().unwrap();
        let (loss, accuracy) = pretrainer.held_out_preference(config, spec).unwrap().unwrap();
        assert!(loss != std::f64::consts::LN_2 && accuracy.is_some());
        assert!(pretrainer.step(config).unwrap().preference.unwrap().reward_chosen != 0.0);
    }
}

#[test]
fn a_reference_that_changed_or_is_gone_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (config, mut pretrainer) = open_pairs(folder.path(), &pairs(8), &[]).unwrap();
    pretrainer.step(&config).unwrap();
    let Reference::Stored(before) = std::mem::replace(&mut pretrainer.reference, Reference::None) else {
        panic!("not stored")
    };
    pretrainer.open_reference(&config, folder.path()).unwrap();
    let Reference::Stored(after) = &pretrainer.reference else { panic!("not stored") };
    assert_eq!(&before, after, "the file holds what was computed");
    assert!(pretrainer.learner.loop_state.contains_key(reference::KEY));
    let path = folder.path().join("reference.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let said = pretrainer.open_reference(&config, folder.path()).unwrap_err().to_string();
    assert!(said.contains("reference.safetensors is not the file that the run wrote"), "{said}");
    std::fs::remove_file(&path).unwrap();
    assert!(pretrainer.open_reference(&config, folder.path()).is_err());
}

#[test]
fn rows_of_the_usual_shapes_are_recognised() {
    let spec = FileTexts { chat_arguments: toml::Table::new(), ..FileTexts::generated(0.0) };
    let read = |row: &Value| JudgedLayout::recognise(&spec, row).and_then(|layout| layout.read(&spec, row));
    let pair = |response: &str| TextRow::Pair { prompt: "1+1=".into(), response: response.into() };
    let talk = |answer: &str| conversation(&[("user", "1+1"), ("assistant", answer)]);
    let judged = |chosen, rejected| TextRow::Judged {
        sides: vec![(Side::Chosen, chosen), (Side::Rejected, rejected)],
        margin: 0.0,
    };
    let user = json!({"role": "user", "content": "1+1"});
    let said = |text: &str| json!({"role": "assistant", "content": text});
    for (row, expected) in [
        (json!({"prompt": "1+1=", "chosen": "2", "rejected": "3"}), judged(pair("2"), pair("3"))),
        // UltraFeedback, binarised: whole conversations, and the prompt once more.
        (
            json!({"prompt": "1+1", "chosen": [user, said("2")], "rejected": [user, said("3")], "score_chosen": 9}),
            judged(talk("2"), talk("3")),
        ),
        (
            json!({"prompt": [user], "chosen": [said("2")], "rejected": [said("3")]}),
            judged(talk("2"), talk("3")),
        ),
        // ShareGPT-like: the conversation so far, and two answers.
        (
            json!({"conversations": [{"from": "human", "value": "1+1"}], "chosen": {"from": "gpt", "value": "2"},
                "rejected": {"from": "gpt", "value": "3"}}),
            judged(talk("2"), talk("3")),
        ),
        (
            json!({"prompt": "1+1=", "completion": "3", "label": false}),
            TextRow::Judged { sides: vec![(Side::Rejected, pair("3"))], margin: 0.0 },
        ),
        (
            json!({"prompt": [user], "completion": [said("2")], "label": 1}),
            TextRow::Judged { sides: vec![(Side::Chosen, talk("2"))], margin: 0.0 },
        ),
    ] {
        assert_eq!(read(&row).unwrap(), expected, "{row}");
    }
    for (row, expected) in [
        (json!({"prompt": "1"}), "looked for chosen with rejected"),
        (json!({"chosen": "2", "rejected": "3"}), "without its prompt"),
        (json!({"prompt": "1", "completion": "2", "label": "good"}), "expected true or false"),
        (json!({"prompt": "1", "chosen": [user], "rejected": [user]}), "does not end with"),
        (json!({"prompt": "1", "chosen": 2, "rejected": 3}), "neither a text nor messages"),
    ] {
        let said = read(&row).unwrap_err();
        assert!(said.contains(expected), "{expected:?} in {said:?}");
    }
}

#[test]
fn data_that_does_not_fit_the_loss_is_refused_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let single = [json!({"prompt": "1+1=", "completion": "2", "label": true})];
    let said = open_pairs(folder.path(), &single, &[]).err().unwrap().to_string();
    assert!(said.contains("1 rows have a single response") && said.contains("kto"), "{said}");
    let task = "data={kind=\"solutions\",task={kind=\"arithmetic\"}}";
    let said = open_pairs(folder.path(), &single, &[task]).err().unwrap().to_string();
    assert!(said.contains("config.data") && said.contains("solution_pairs"), "{said}");
    let made = "data={kind=\"solution_pairs\",rows=4,task={kind=\"arithmetic\"},chosen={}}";
    let said = open(folder.path(), &single, &["steps=1", made]).err().unwrap().to_string();
    assert!(said.contains("stapo prefer"), "{said}");
    let said = open_pairs(folder.path(), &pairs(2), &["loss_on=everything"]).err().unwrap().to_string();
    assert!(said.contains("config.loss_on: everything"), "{said}");
    let said =
        open_pairs(folder.path(), &pairs(2), &["update.microbatch_tokens=9"]).err().unwrap().to_string();
    assert!(said.contains("2 of 2 rows have more than 9 tokens"), "a pair shares a pass: {said}");
}

#[test]
fn solution_pairs_plant_typos_in_chosen_solutions_alone() {
    let folder = tempfile::tempdir().unwrap();
    let right = "wrong_result_share=0.0,wrong_order_share=0.0,skipped_step_share=0.0,skipped_wrong_share=0.0";
    let data = |typos: f64| {
        format!(
            "data={{kind=\"solution_pairs\",rows=30,task={{kind=\"arithmetic\"}},chosen={{{right},typo_share={typos}}},rejected={{{right},typo_share=0.0}}}}"
        )
    };
    let texts = |typos: f64| -> Vec<Vec<String>> {
        let (_, pretrainer) = open_pairs(folder.path(), &[], &[&data(typos)]).unwrap();
        let (rows, _) = pretrainer.file().unwrap().all();
        rows.map(|row| row.parts().into_iter().map(str::to_string).collect()).collect()
    };
    let (clean, planted) = (texts(0.0), texts(0.2));
    assert_eq!(clean.len(), 30);
    let differ = |side: usize| clean.iter().zip(&planted).filter(|(a, b)| a[side] != b[side]).count();
    assert!(differ(1) > 20, "{} chosen responses differ", differ(1));
    assert_eq!((differ(0), differ(2), differ(3)), (0, 0, 0));
}
