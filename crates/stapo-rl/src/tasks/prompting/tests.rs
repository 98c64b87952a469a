use super::*;
use crate::plan::config::Config;
use crate::reward::Programs;
use crate::testing::{TEMPLATE, chat_model};
use crate::train::Trainer;
use stapo_core::{Finish, Turn};
use stapo_model::{CpuOptions, Device};
use std::path::Path;

fn device() -> Device {
    Device::cpu(CpuOptions { threads: 2, ..CpuOptions::from_env().unwrap() })
}

/// A plan on a file of `{"problem", "answer"}` rows, with the built-in model.
fn plan(folder: &Path, problems: &[String], settings: &[&str]) -> Plan {
    let path = folder.join("rows.jsonl");
    let row = |problem: &String| format!("{{\"problem\": \"{problem}\", \"answer\": 1}}\n");
    std::fs::write(&path, problems.iter().map(row).collect::<String>()).unwrap();
    let task =
        format!("task={{kind=\"jsonl\",path={path:?},template=\"{{{{ problem }}}}\",held_out_share=0.2}}");
    let fixed = [task.as_str(), "rollout.max_prompt_tokens=16", "rollout.problems_per_step=4"];
    let minibatch = ["update.problems_per_minibatch=4"];
    let settings = [&fixed, &minibatch[..], settings].concat();
    Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap()
}

/// 300 short problems, of which the given ones are made longer.
fn problems(long: &[(usize, usize)]) -> Vec<String> {
    let mut problems: Vec<String> = (0..300).map(|i| format!("{i}+1=")).collect();
    for &(at, n_tokens) in long {
        problems[at] = format!("{:0>n_tokens$}", problems[at]);
    }
    problems
}

#[test]
fn characters_without_a_token_are_told_and_refused_where_every_prompt_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = problems(&[]);
    let warnings = |rows: &[String]| -> Result<Vec<String>> {
        let plan = plan(folder.path(), rows, &[]);
        let mut task = Task::open_with(&plan.task, Programs::Never)?;
        let model = PromptModel::open(&plan.config.model)?;
        let prompting = model.prompting(&plan.style)?;
        fit_prompts(&plan, &prompting, &mut task)
    };
    assert_eq!(warnings(&rows).unwrap(), [""; 0]);
    rows[4] = "4+1=é".into();
    rows[200] = "2ü+1é=".into();
    let said = warnings(&rows).unwrap();
    for part in ["2 of 300 prompts have characters", "does not see them: 'é', 'ü'; that of problem"] {
        assert!(said.len() == 1 && said[0].contains(part), "{part:?} in {said:?}");
    }
    let worded: Vec<String> = rows.iter().map(|row| format!("What is {row}")).collect();
    let said = warnings(&worded).unwrap_err().to_string();
    for part in
        ["every prompt has characters that the model's tokenizer has no token for: ", "'W'", "\nhint: "]
    {
        assert!(said.contains(part), "{part:?} in {said}");
    }
}

#[test]
fn templates_that_cannot_go_on_or_drop_thinking_are_found_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let environment = "environment={kind=\"tools\", tools=[{kind=\"calculator\"}]}";
    let plan = plan(folder.path(), &problems(&[]), &[environment, "rollout.max_prompt_tokens=64"]);
    let warnings = |name: &str, template: &str| -> Result<Vec<String>> {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let path = chat_model(&folder, template).display().to_string();
        let model = PromptModel::open(&ModelSource::Path { path })?;
        let style = PromptStyle { chat: true, ..PromptStyle::default() };
        let mut task = Task::open_with(&plan.task, Programs::Never)?;
        fit_prompts(&plan, &model.prompting(&style)?, &mut task)
    };
    let all = "{% for m in messages %}{{ m.content }}={% endfor %}";
    assert_eq!(warnings("all", all).unwrap(), [""; 0]);
    let thoughtless = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}={% endfor %}";
    let said = warnings("thoughtless", thoughtless).unwrap();
    assert!(said.len() == 1 && said[0].contains("thinking of earlier turns"), "{said:?}");
    let deaf = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}={% endif %}{% endfor %}";
    let said = warnings("deaf", deaf).unwrap_err().to_string();
    assert!(said.contains("leaves out or moves the content of observation 1"), "{said}");
}

#[test]
fn every_long_prompt_is_found_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let rows = problems(&[(7, 17), (100, 41), (200, 40), (299, 16)]);
    let refused = plan(folder.path(), &rows, &[]);
    let said = Trainer::new(&refused, &device(), Programs::Never).err().unwrap().to_string();
    for part in [
        "3 of 300 prompts are longer than 16",
        "\"rows-101\"",
        "has 41",
        "raise it to 41",
        "long_prompts=drop",
    ] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let dropping = plan(folder.path(), &rows, &["rollout.long_prompts=drop"]);
    let trainer = Trainer::new(&dropping, &device(), Programs::Never).unwrap();
    let n = |split| trainer.task.n_problems(split).unwrap();
    assert_eq!(n(Split::Train) + n(Split::HeldOut), 297);
    let drawn = (0..2 * n(Split::Train)).map(|at| trainer.task.problem(0, Split::Train, at).unwrap());
    assert!(drawn.into_iter().all(|problem| problem.prompt.len() <= 16));
    // Without a problem that short, nothing is left.
    let none = plan(folder.path(), &rows, &["rollout.long_prompts=drop", "rollout.max_prompt_tokens=2"]);
    let said = Trainer::new(&none, &device(), Programs::Never).err().unwrap().to_string();
    assert!(said.contains("2 is below every prompt of the train split"), "{said}");
}

#[test]
fn lengths_are_those_of_the_tokens_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let rows = problems(&[(7, 17), (100, 40)]);
    let plan = plan(folder.path(), &rows, &[]);
    let task = Task::open_with(&plan.task, Programs::Never).unwrap();
    let path = chat_model(folder.path(), TEMPLATE).display().to_string();
    let model = PromptModel::open(&ModelSource::Path { path }).unwrap();
    for chat in [false, true] {
        let style = PromptStyle { chat, ..PromptStyle::default() };
        let prompting = model.prompting(&style).unwrap();
        let known = task.known_problems();
        let one_by_one: Vec<usize> =
            known.iter().map(|problem| prompting.tokens(problem).unwrap().len()).collect();
        assert_eq!(prompting.lengths(&known).unwrap(), one_by_one);
    }
}

fn problem(prompt: &str, earlier: &[(&str, &str)]) -> Problem {
    let turn = |&(role, content): &(&str, &str)| Turn { role: role.into(), content: content.into() };
    Problem {
        id: "p".into(),
        earlier_turns: earlier.iter().map(turn).collect(),
        prompt: prompt.into(),
        reference: String::new(),
    }
}

#[test]
fn conversations_are_rendered_whole_with_the_arguments_of_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let path = chat_model(folder.path(), TEMPLATE).display().to_string();
    let model = PromptModel::open(&ModelSource::Path { path }).unwrap();
    let text = |style: &PromptStyle, problem: &Problem| {
        let tokens = model.prompting(style).unwrap().tokens(problem)?;
        Ok::<_, Error>(model.tokenizer.decode_all(&tokens).unwrap())
    };
    let asked = problem("2+2", &[("system", "add"), ("user", "1+1"), ("assistant", "2")]);
    let mut style = PromptStyle { chat: true, ..PromptStyle::default() };
    assert_eq!(text(&style, &asked).unwrap(), "(add)1+1=2<|end|>:2+2=so ");
    style.chat_arguments.insert("shout".into(), true.into());
    assert_eq!(text(&style, &asked).unwrap(), "(add)1+1+=2<|end|>:2+2+=so ");
    let plain = PromptStyle::default();
    assert_eq!(text(&plain, &problem("2+2", &[])).unwrap(), "2+2");
    let said = text(&plain, &asked).unwrap_err().to_string();
    assert!(said.contains("rollout.chat: false") && said.contains("role \"system\""), "{said}");
    let without = PromptModel::open(&ModelSource::Builtin).unwrap();
    let said = without.prompting(&style).err().unwrap().to_string();
    assert!(said.contains("the model has no chat template"), "{said}");
}

#[test]
fn a_prompt_that_the_template_refuses_or_the_tokenizer_loses_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = problems(&[]);
    rows[120] = "???".into();
    let plan = plan(folder.path(), &rows, &[]);
    let said = Trainer::new(&plan, &device(), Programs::Never).err().unwrap().to_string();
    assert!(said.contains("problem \"rows-121\": the tokenizer turns its prompt into no token"), "{said}");
    let picky = "{% for m in messages %}{% if m.content == '???' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
    let path = chat_model(folder.path(), picky).display().to_string();
    let model = PromptModel::open(&ModelSource::Path { path }).unwrap();
    let style = PromptStyle { chat: true, ..PromptStyle::default() };
    let task = Task::open_with(&plan.task, Programs::Never).unwrap();
    let said = model.prompting(&style).unwrap().lengths(&task.known_problems()).unwrap_err().to_string();
    assert!(said.contains("problem \"rows-121\"") && said.contains("refuses the conversation: no"), "{said}");
}

#[test]
fn generated_problems_with_long_prompts_are_skipped_as_they_are_drawn() {
    let settings =
        ["seed=3", "rollout.problems_per_step=8", "update.problems_per_minibatch=8", "rollout.group_size=2"];
    let limited =
        ["rollout.max_prompt_tokens=8", "rollout.long_prompts=drop", "rollout.max_response_tokens=4"];
    let plan = Plan::resolve(Config::from_toml("", [&settings[..], &limited].concat()).unwrap()).unwrap();
    let mut trainer = Trainer::new(&plan, &device(), Programs::Never).unwrap();
    let rolled = trainer.roll_out(&plan).unwrap();
    assert_eq!(rolled.batch.groups.len(), 8);
    assert!(rolled.batch.groups.iter().all(|group| group.problem.prompt.len() <= 8));
    assert!(rolled.n_drawn > 8, "{} drawn", rolled.n_drawn);
    // Held-out problems are known before the run, which is refused where all of them are too long.
    let limited = [
        "rollout.max_prompt_tokens=1",
        "rollout.long_prompts=drop",
        "rollout.max_response_tokens=4",
        "task.held_out_share=0",
    ];
    let plan = Plan::resolve(Config::from_toml("", [&settings[..], &limited].concat()).unwrap()).unwrap();
    let mut trainer = Trainer::new(&plan, &device(), Programs::Never).unwrap();
    let said = trainer.roll_out(&plan).err().unwrap().to_string();
    assert!(said.contains("801 problems gave 0 with a prompt this short"), "{said}");
}

#[test]
fn a_response_ends_with_the_token_that_completes_a_stop_text() {
    let settings = ["rollout.problems_per_step=4", "update.problems_per_minibatch=4", "rollout.group_size=4"];
    let plan = |more: &[&str]| {
        Plan::resolve(Config::from_toml("", [&settings[..], more].concat()).unwrap()).unwrap()
    };
    let responses = |plan: &Plan| {
        let mut trainer = Trainer::new(plan, &device(), Programs::Never).unwrap();
        let rolled = trainer.roll_out(plan).unwrap();
        let tokenizer = trainer.learner.model.tokenizer().unwrap();
        let response = |scored: &stapo_core::Scored| {
            (tokenizer.decode(scored.rollout.response()).unwrap(), scored.rollout.finish)
        };
        rolled.batch.responses().map(response).collect::<Vec<_>>()
    };
    let whole = responses(&plan(&[]));
    let stopped = responses(&plan(&["rollout.stop=[\", \", \"never\"]"]));
    let mut n_cut = 0;
    for ((whole, _), (text, finish)) in whole.iter().zip(&stopped) {
        match whole.find(", ") {
            Some(at) => {
                assert_eq!(text, &whole[..at + 2], "the same tokens, up to the text");
                assert!(matches!(finish, Finish::Stop { .. }), "{finish:?}");
                n_cut += 1;
            }
            None => assert_eq!(text, whole),
        }
    }
    assert!(n_cut > 4, "{whole:?}");
}

#[test]
fn an_observation_is_cut_in_its_middle_by_tokens() {
    let model = PromptModel::open(&ModelSource::Builtin).unwrap();
    let style = PromptStyle::default();
    let prompting = model.prompting(&style).unwrap();
    let cut = |content: &str, limit| {
        let mut turn = Turn { role: "tool".into(), content: content.into() };
        let is_cut = prompting.cut(&mut turn, limit).unwrap();
        (is_cut, turn.content)
    };
    // The built-in model has a token for each character.
    assert_eq!(cut("123456789", 9), (false, "123456789".into()));
    assert_eq!(cut("123456789", 5), (true, "123 [4 tokens cut] 89".into()));
    assert_eq!(cut("123456789", 1), (true, "1 [8 tokens cut] ".into()));
}

#[test]
fn what_stands_between_turns_is_the_observation_and_no_token_of_the_turns() {
    let model = PromptModel::open(&ModelSource::Builtin).unwrap();
    let style = PromptStyle::default();
    let prompting = model.prompting(&style).unwrap();
    let opening = [Turn { role: "user".into(), content: "1+1=".into() }];
    let observation = [Turn { role: "user".into(), content: "12".into() }];
    let given = prompting.continuation(&opening, &observation, None).unwrap();
    assert!(model.tokenizer.decode_all(&given).unwrap().contains("12"));
    // The text of the end token is spelled out where an observation has it.
    let end = model.tokenizer.id_of("<|end|>").unwrap();
    let hostile = [Turn { role: "user".into(), content: "1<|end|>2".into() }];
    let given = prompting.continuation(&opening, &hostile, Some(end)).unwrap();
    assert!(!given.contains(&end), "{given:?}");
}

/// A mixture draws from each of its sources, so each of them needs a problem.
#[test]
fn a_source_of_a_mixture_whose_prompts_are_all_too_long_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = |name: &str, n_tokens: usize| {
        let path = folder.path().join(name);
        let row = |n: usize| format!("{{\"problem\": \"{n:0>n_tokens$}\", \"answer\": 1}}\n");
        std::fs::write(&path, (0..20).map(row).collect::<String>()).unwrap();
        path
    };
    let (short, long) = (source("short.jsonl", 8), source("long.jsonl", 12));
    let fitted = |limit: usize| {
        let task = format!(
            "task={{kind=\"file\",path=[{short:?},{long:?}],weights=[3.0,1.0],template=\"{{{{ problem }}}}\"}}"
        );
        let limit = format!("rollout.max_prompt_tokens={limit}");
        let set = [task.as_str(), &limit, "rollout.long_prompts=drop"];
        let plan = Plan::resolve(Config::from_toml("", set).unwrap()).unwrap();
        let mut task = Task::open_with(&plan.task, Programs::Never).unwrap();
        let model = PromptModel::open(&plan.config.model).unwrap();
        let prompting = model.prompting(&plan.style).unwrap();
        fit_prompts(&plan, &prompting, &mut task)
    };
    assert_eq!(fitted(12).unwrap(), [""; 0]);
    let said = fitted(11).unwrap_err().to_string();
    assert!(said.contains("11 is below every training prompt of entry 2 of task.path"), "{said}");
}
