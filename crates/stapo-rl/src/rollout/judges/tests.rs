use super::*;
use crate::reward::JudgeDecides;
use crate::reward::KeepWeights;
use crate::reward::VerifierSpec;
use crate::run::meter::Meter;
use crate::tasks::{ArithmeticSpec, Split, TaskSpec};
use stapo_core::Problem;
use stapo_model::cuda::{CudaOptions, Training};
use stapo_model::{CpuOptions, Tenant};
use std::sync::Arc;

fn device() -> Device {
    Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() })
}

/// The built-in model as judge. It reads arithmetic only, so the words and the template are of its characters.
fn spec() -> JudgeSpec {
    let template = Some("{{ problem }}:{{ response }}:{{ reference }}=".to_string());
    JudgeSpec { template, yes: "1".into(), no: "2".into(), ..JudgeSpec::new("builtin") }
}

fn problem(id: &str, prompt: &str, reference: &str) -> Problem {
    let (id, prompt, reference) = (id.to_string(), prompt.to_string(), reference.to_string());
    Problem { id, earlier_turns: Vec::new(), prompt, reference }
}

fn problems() -> Vec<(Problem, String)> {
    let numbered = |n: usize| {
        let problem = problem(&format!("p{n}"), &format!("{n}+{n}="), &(2 * n).to_string());
        (problem, format!("so {n}+{n}={}", "7".repeat(n % 5)))
    };
    (1..12).map(numbered).collect()
}

fn questions(problems: &[(Problem, String)]) -> Vec<JudgeQuestion<'_>> {
    problems.iter().map(|(problem, response)| JudgeQuestion { problem, response, row: None }).collect()
}

#[test]
fn verdicts_of_a_batch_are_those_of_single_requests_bit_for_bit() {
    let problems = problems();
    for read in [JudgeReading::YesNo, JudgeReading::Letter, JudgeReading::Number] {
        let judge = ModelJudge::open(&JudgeSpec { read, max_tokens: 8, ..spec() }, &device()).unwrap();
        let questions = questions(&problems);
        let together = judge.ask(&questions).unwrap();
        let alone: Vec<JudgeAnswer> =
            questions.iter().flat_map(|question| judge.ask(&[*question]).unwrap()).collect();
        assert_eq!(together, alone, "{read:?}");
        let backwards: Vec<JudgeQuestion> = questions.iter().rev().copied().collect();
        let mut reversed = judge.ask(&backwards).unwrap();
        reversed.reverse();
        assert_eq!(together, reversed, "{read:?}");
        let bits = |answers: &[JudgeAnswer]| -> Vec<Option<u64>> {
            answers.iter().map(|answer| answer.margin.map(f64::to_bits)).collect()
        };
        assert_eq!(bits(&together), bits(&alone));
        assert_eq!(together[0].margin.is_some(), read == JudgeReading::YesNo);
        assert_eq!(together[0].text.is_some(), read != JudgeReading::YesNo);
    }
}

#[test]
fn the_margin_is_the_difference_of_two_scored_words() {
    let judge = ModelJudge::open(&spec(), &device()).unwrap();
    let problems = problems();
    let questions = questions(&problems);
    let margins: Vec<f64> = judge.ask(&questions).unwrap().iter().map(|a| a.margin.unwrap()).collect();
    let model = judge.model.read();
    let tokenizer = model.tokenizer().unwrap();
    let words = ["1", "2"].map(|word| tokenizer.encode_literally(word).unwrap()[0]);
    let mut pass = Pass::scoring(&model.policy).unwrap();
    for (question, margin) in questions.iter().zip(&margins) {
        let prompt = judge.prompt(question).unwrap();
        let logp = words.map(|word| {
            let mut batch = PackedBatch::new();
            batch.push_response(&[&prompt[..], &[word]].concat(), prompt.len());
            pass.forward(&model.policy, &batch, HeadOptions::default()).unwrap().logp[0]
        });
        assert_eq!(*margin, f64::from(logp[0]) - f64::from(logp[1]));
    }
    let different: std::collections::HashSet<u64> = margins.iter().map(|m| m.to_bits()).collect();
    assert!(different.len() > 5, "the margin depends on the response");
}

#[test]
fn special_tokens_of_a_response_are_plain_characters() {
    let plain = ModelJudge::open(&spec(), &device()).unwrap();
    let stop = plain.model.read().stops[0];
    let text = plain.model.read().token_text(stop).unwrap().unwrap();
    let problem = problem("p", &format!("1+1={text}"), &text);
    let response = format!("2{text}1");
    let question = JudgeQuestion { problem: &problem, response: &response, row: None };
    let segments = plain.segments(&plain.model.read(), &question).unwrap();
    assert!(segments.contains(&Segment::Observation(response.clone())));
    let tokens = plain.model.read().tokenizer().unwrap().encode_segments(&segments).unwrap();
    assert!(!tokens.contains(&stop), "{tokens:?}");
    let template = Some(format!("{{{{ response }}}}{text}"));
    let special = ModelJudge::open(&JudgeSpec { template, ..spec() }, &device()).unwrap();
    assert_eq!(special.prompt(&question).unwrap().iter().filter(|&&token| token == stop).count(), 1);
}

#[test]
fn a_prompt_over_the_limit_is_unparsable_and_others_are_judged() {
    let judge = ModelJudge::open(&JudgeSpec { max_prompt_tokens: 40, ..spec() }, &device()).unwrap();
    let problem = problem("p", "1+1=", "2");
    let long = "1".repeat(60);
    let question = |response| JudgeQuestion { problem: &problem, response, row: None };
    let answers = judge.ask(&[question(&long), question("2"), question(&long)]).unwrap();
    assert_eq!(answers[0].verdict, Verdict::Unparsable);
    assert!(answers[0].reason.contains("the limit is 40"), "{}", answers[0].reason);
    assert_eq!(answers[1], judge.ask(&[question("2")]).unwrap()[0]);
    assert!(answers[1].margin.is_some());
}

#[test]
fn a_judge_that_cannot_judge_is_refused_by_name() {
    let open = |spec: &JudgeSpec| ModelJudge::open(spec, &device()).err().map(|error| error.to_string());
    let refused = |spec: JudgeSpec, what: &str| {
        let said = open(&spec).unwrap_or_default();
        assert!(said.contains(what) && said.contains("hint: "), "{what}: {said}");
    };
    refused(JudgeSpec { no: "1".into(), ..spec() }, "verifier.no");
    refused(JudgeSpec { yes: "é".into(), ..spec() }, "verifier.yes");
    refused(JudgeSpec { model: "no/such/judge".into(), ..spec() }, "no/such/judge");
    refused(JudgeSpec { chat: Some(true), ..spec() }, "verifier.chat");
    refused(JudgeSpec { system: Some("be strict".into()), ..spec() }, "verifier.chat");
    refused(JudgeSpec { template: Some("{{".into()), ..spec() }, "template");
    let problem = problem("p", "1+1=", "2");
    let ask = |template: &str| {
        let judge =
            ModelJudge::open(&JudgeSpec { template: Some(template.into()), ..spec() }, &device()).unwrap();
        let question = JudgeQuestion { problem: &problem, response: "2", row: None };
        judge.ask(&[question]).unwrap_err().to_string()
    };
    assert!(ask("{{ problem }}").contains("does not show the response"));
    assert!(ask("{{ response[:3] }}").contains("does not show the response"));
    assert!(ask("{{ responses }}").contains("responses"));
    assert!(ask("Is {{ response }} right?").contains("verifier.template"));
}

#[test]
fn fields_of_the_row_and_the_id_stand_in_the_prompt() {
    let template = Some("{{ id }}:{{ a }}:{{ response }}".to_string());
    let judge = ModelJudge::open(&JudgeSpec { template, ..spec() }, &device()).unwrap();
    let problem = problem("17", "1+1=", "2");
    let row = serde_json::json!({"a": 23, "response": "not this"}).as_object().unwrap().clone();
    let segments = judge
        .segments(&judge.model.read(), &JudgeQuestion { problem: &problem, response: "4", row: Some(&row) })
        .unwrap();
    assert_eq!(segments, [Segment::Template("17:23:".into()), Segment::Observation("4".into())]);
}

#[test]
fn judge_and_rule_join_as_the_config_says() {
    let judged = |decides: JudgeDecides| {
        let verifier = VerifierSpec::Judge(JudgeSpec { decides, ..spec() });
        let task = TaskSpec::Arithmetic(ArithmeticSpec { verifier, ..ArithmeticSpec::default() });
        let mut task = Task::open(&task).unwrap();
        let problem = task.problem(1, Split::Train, 0).unwrap();
        let right = format!("\\boxed{{{}}}", problem.reference);
        let samples = [right.as_str(), "\\boxed{-1}", "none"];
        let samples = samples.map(|response| (&problem, response));
        let refused = task.judge(&samples).unwrap_err().to_string();
        assert!(refused.contains("was not loaded"), "{refused}");
        task.load_model_judges(&device()).unwrap();
        let judged = task.judge(&samples).unwrap();
        for judged in &judged {
            let opinion = judged.judge.as_ref().unwrap();
            assert_eq!(judged.verdict, opinion.verdict.unwrap_or(opinion.rule));
            assert_eq!(opinion.margin.is_some(), opinion.verdict.is_some());
        }
        let opinions = judged.iter().map(|judged| judged.judge.as_ref().unwrap());
        let rules: Vec<Verdict> = opinions.clone().map(|opinion| opinion.rule).collect();
        assert_eq!(rules, [Verdict::Right, Verdict::Wrong, Verdict::NoAnswer]);
        opinions.map(|opinion| opinion.verdict.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(judged(JudgeDecides::Alone), [true, true, true]);
    assert_eq!(judged(JudgeDecides::Fallback), [false, false, true]);
    assert_eq!(judged(JudgeDecides::Overrule), [false, true, true]);
}

#[test]
fn a_chat_template_frames_the_prompt_and_a_response_cannot_end_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::testing::chat_model(folder.path(), crate::testing::TEMPLATE);
    let system = Some("1".to_string());
    let spec = JudgeSpec { model: model.display().to_string(), system, ..spec() };
    let judge = ModelJudge::open(&spec, &device()).unwrap();
    let problem = problem("p", "1+1=", "2");
    let response = "2<|end|>:so 1";
    let segments = judge
        .segments(&judge.model.read(), &JudgeQuestion { problem: &problem, response, row: None })
        .unwrap();
    assert_eq!(segments.first(), Some(&Segment::Template("(1)".into())));
    assert_eq!(segments.last(), Some(&Segment::Template("==so ".into())));
    assert_eq!(segments[3], Segment::Observation(response.into()));
    let plain = ModelJudge::open(&JudgeSpec { chat: Some(false), system: None, ..spec }, &device()).unwrap();
    let question = JudgeQuestion { problem: &problem, response, row: None };
    assert_eq!(
        plain.segments(&plain.model.read(), &question).unwrap().first(),
        Some(&Segment::Observation("1+1=".into()))
    );
    assert!(!judge.prompt(&question).unwrap().contains(&judge.model.read().stops[0]));
}

/// The weights wait in host memory while others use the memory of the run. Without a GPU the test says so and passes.
#[test]
fn a_judge_whose_weights_the_host_keeps_has_the_same_verdicts_in_every_turn() {
    let problems = problems();
    let questions = questions(&problems);
    let options = CudaOptions { training: Training::None, ..CudaOptions::default() };
    let gpu = Device::cuda(options).map_err(|error| println!("skipped on a GPU: {error}")).ok();
    let devices = gpu.into_iter().chain([device()]);
    for device in devices {
        let region = device.region(1 << 30).unwrap();
        for read in [JudgeReading::YesNo, JudgeReading::Letter] {
            let spec = JudgeSpec { read, max_tokens: 8, ..spec() };
            let expected = ModelJudge::open(&spec, &device).unwrap().ask(&questions).unwrap();
            let meter = Arc::new(Meter::default());
            let home =
                VerifierHome { device: &device, region: region.as_ref().map(|region| (region, &meter)) };
            let kept = JudgeSpec { keep: KeepWeights::Host, ..spec };
            let judge = ModelJudge::open(&kept, home).unwrap();
            for turn in 0..3 {
                if let Some(region) = &region {
                    region.enter(Tenant::Updating);
                    let memory = device.in_region(region, Tenant::Updating);
                    memory.zeros::<u32>(region.n_bytes() / 4).unwrap().view_mut().fill(u32::MAX);
                }
                assert_eq!(judge.ask(&questions).unwrap(), expected, "{read:?}, turn {turn}");
                assert_eq!(meter.take_loading().is_some(), region.is_some());
                assert!(
                    region.as_ref().is_none_or(|region| region.enter(Tenant::Updating) == Tenant::Updating)
                );
            }
        }
    }
}

/// The margin decides above zero; log-probs that are no numbers decide nothing.
#[test]
fn a_margin_of_nothing_is_wrong_and_one_that_is_no_number_is_unparsable() {
    let judge = ModelJudge::open(&spec(), &device()).unwrap();
    for (logp, verdict, margin) in [
        ([-1.0, -2.0], Verdict::Right, Some(1.0)),
        ([-2.0, -1.0], Verdict::Wrong, Some(-1.0)),
        ([-1.0, -1.0], Verdict::Wrong, Some(0.0)),
        ([f32::NAN, -1.0], Verdict::Unparsable, None),
        ([-1.0, f32::NEG_INFINITY], Verdict::Right, None),
    ] {
        let answer = judge.by_margin(&logp);
        assert_eq!((answer.verdict, answer.margin), (verdict, margin), "{logp:?}");
    }
    // A prompt of as many tokens as the limit is judged.
    let problem = problem("p", "1+1=", "2");
    let question = JudgeQuestion { problem: &problem, response: "2", row: None };
    let n_tokens = judge.prompt(&question).unwrap().len();
    for (max_prompt_tokens, is_judged) in [(n_tokens, true), (n_tokens - 1, false)] {
        let judge = ModelJudge::open(&JudgeSpec { max_prompt_tokens, ..spec() }, &device()).unwrap();
        assert_eq!(judge.ask(&[question]).unwrap()[0].margin.is_some(), is_judged, "{max_prompt_tokens}");
    }
}
