use super::*;
use crate::plan::config::Config;
use crate::reward::Programs;
use crate::run::records::{response_records, silenced_records};
use crate::tasks::{Answer, Rewards, Split};
use crate::train::Trainer;
use stapo_core::record::ResponseRecord;
use stapo_model::{CpuOptions, Device};

/// A plan of small steps with two optimizer steps each.
fn plan() -> Plan {
    let settings = [
        "rollout.problems_per_step=4",
        "update.problems_per_minibatch=2",
        "record.responses=100",
        "objective={preset=\"stapo\", masks=[{kind=\"spurious\", tau_p=0.3}]}",
    ];
    Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap()
}

fn trainer(plan: &Plan, source: impl RolloutSource + 'static) -> Trainer {
    let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
    let mut trainer = Trainer::new(plan, &device, Programs::Recorded).unwrap();
    trainer.source = Box::new(source);
    trainer
}

/// The policy's rollouts with two tokens of each response marked as given, as if an environment had answered in between.
#[derive(Default)]
struct Answered(PolicySource);

/// The given tokens by their index in the response.
const GIVEN: std::ops::Range<usize> = 3..5;

impl RolloutSource for Answered {
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled> {
        let mut sampled = self.0.next(training)?;
        for member in sampled.batch.groups.iter_mut().flat_map(|group| &mut group.members) {
            let rollout = &mut member.rollout;
            assert!(rollout.response().len() > GIVEN.end, "a response this short has no middle");
            let n_prompt = rollout.prompt().len();
            rollout.is_sampled[n_prompt + GIVEN.start..n_prompt + GIVEN.end].fill(false);
            rollout.logp.drain(GIVEN);
            rollout.entropy.drain(GIVEN);
        }
        Ok(sampled)
    }
}

#[test]
fn a_response_with_given_tokens_in_its_middle_is_learned_from_by_its_sampled_tokens() {
    let plan = plan();
    let mut trainer = trainer(&plan, Answered::default());
    let rolled = trainer.roll_out(&plan).unwrap();
    // The canary of exactness compares every sampled token with the training forward.
    let learned = trainer.learn(&plan, &rolled).unwrap();
    assert_eq!(learned[0].exactness_max_abs, 0.0);
    let n_sampled: usize = rolled.batch.responses().map(|scored| scored.rollout.n_sampled()).sum();
    let n_response: usize = rolled.batch.responses().map(|scored| scored.rollout.response().len()).sum();
    assert_eq!(n_response - n_sampled, 2 * rolled.batch.responses().count());
    assert_eq!(learned.iter().map(|update| update.tally.n_tokens).sum::<usize>(), n_sampled);
    let model = &trainer.learner.model;
    let records = response_records(&plan, 1, model, &rolled, &learned).unwrap();
    assert_eq!(records.len(), rolled.batch.responses().count());
    for (record, scored) in records.iter().zip(rolled.batch.responses()) {
        let given = &scored.rollout.response()[GIVEN];
        assert_eq!((record.schema, record.given.len()), (ResponseRecord::SCHEMA_WITH_GIVEN, 1));
        assert_eq!((record.given[0].after, record.given[0].id.as_slice()), (GIVEN.start, given));
        assert_eq!(record.tokens.id, scored.rollout.sampled_tokens().collect::<Vec<_>>());
        assert_eq!(record.tokens.logp.len(), record.tokens.id.len());
        let before: String = record.tokens.text[..GIVEN.start].concat();
        assert!(record.text.starts_with(&format!("{before}{}", record.given[0].text)), "{}", record.text);
    }
    let silenced = silenced_records(1, model, &learned).unwrap();
    assert!(!silenced.is_empty());
    for token in silenced {
        let is_of =
            |r: &&ResponseRecord| (&r.problem_id, r.sample_idx) == (&token.problem_id, token.sample_idx);
        let response = records.iter().find(is_of).unwrap();
        assert_eq!(response.tokens.id[token.token_idx], token.id);
        let around = format!("{}{}{}", token.context_before, token.text, token.context_after);
        assert!(response.text.contains(around.trim_end_matches("<|end|>")), "{around:?}");
    }
}

/// The rollouts of the first step in every step.
#[derive(Default)]
struct Stale {
    fresh: PolicySource,
    first: Option<Batch>,
}

impl RolloutSource for Stale {
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled> {
        let sampled = self.fresh.next(training)?;
        let batch = self.first.get_or_insert_with(|| sampled.batch.clone()).clone();
        Ok(Sampled { batch, ..sampled })
    }
}

#[test]
fn a_response_of_an_earlier_policy_is_off_policy_from_its_first_update() {
    let plan = plan();
    let mut trainer = trainer(&plan, Stale::default());
    for step in 0..2 {
        let rolled = trainer.roll_out(&plan).unwrap();
        let learned = trainer.learn(&plan, &rolled).unwrap();
        let on_policy: Vec<bool> =
            learned.iter().map(|update| update.members.iter().all(|member| member.is_on_policy)).collect();
        assert_eq!(on_policy, [step == 0, false], "step {step}");
        assert_eq!(learned[0].exactness_max_abs == 0.0, step == 0, "step {step}");
    }
}

#[test]
fn a_task_answers_one_turn_with_the_judgements_of_its_rewards() {
    let task = Task::open(&crate::tasks::TaskSpec::default()).unwrap();
    let problem = task.problem(7, Split::Train, 0).unwrap();
    let right = [task.solution(&problem, &crate::tasks::Mistakes::NONE).unwrap()];
    let wrong = ["no idea".to_string()];
    let turns = [&right, &wrong].map(|texts| PolicyTurn { episode: 0, problem: &problem, texts });
    for rewards in [Rewards::All, Rewards::First] {
        let environment = task.environment(rewards);
        assert_eq!(environment.begin(&problem), problem.messages());
        let verdict = |answer: Answer| match answer.reply {
            Reply::Done(judged) => judged[0].verdict,
            Reply::Continue(_) => panic!("a task of one turn goes on"),
        };
        let verdicts: Vec<Verdict> = environment.answer(&turns).unwrap().into_iter().map(verdict).collect();
        assert_eq!(verdicts, [Verdict::Right, Verdict::NoAnswer]);
    }
}

/// A response of `n_sampled` tokens with these judgements, after a prompt of one token.
fn judged(n_sampled: usize, judged: Vec<Judged>) -> JudgedRollout {
    let sampled: Vec<u32> = (0..n_sampled as u32).collect();
    let (tokens, is_sampled) = Rollout::one_turn(&[9], &sampled);
    let rollout = Rollout {
        problem_idx: 0,
        sample_idx: 0,
        tokens,
        is_sampled,
        logp: vec![-0.5; n_sampled],
        entropy: vec![0.5; n_sampled],
        kept: Vec::new(),
        finish: stapo_core::Finish::LengthLimit,
        policy_version: None,
    };
    JudgedRollout { rollout, judged, episode: None }
}

fn verdict(verdict: Verdict) -> Judged {
    Judged::new(verdict, None, String::new())
}

const TWO_REWARDS: &str =
    "rewards=[{name=\"a\",right=2.0,wrong=-2.0,weight=3.0},{name=\"b\",right=0.5,wrong=0.25,weight=-1.0}]";

#[test]
fn rewards_are_weighed_and_the_first_bears_the_length() {
    let overlong = "rollout.overlong={max_tokens=10,buffer_tokens=4}";
    let plan = Plan::resolve(Config::from_toml("", [TWO_REWARDS, overlong]).unwrap()).unwrap();
    let rewarded = |n_sampled, first: Judged, second: Judged| {
        let scored = scored(&plan, judged(n_sampled, vec![first, second]));
        (scored.verdict, scored.rewards, scored.reward)
    };
    let (right, wrong) = (|| verdict(Verdict::Right), || verdict(Verdict::Wrong));
    assert_eq!(rewarded(6, right(), wrong()), (Verdict::Right, vec![2.0, 0.25], 5.75));
    // Two tokens of the buffer of four cost a half.
    assert_eq!(rewarded(8, wrong(), right()), (Verdict::Wrong, vec![-2.5, 0.5], -8.0));
    // What a verifier gives stands for what its verdict is worth.
    let given = Judged { reward: Some(0.125), ..wrong() };
    assert_eq!(rewarded(6, given.clone(), given), (Verdict::Wrong, vec![0.125, 0.125], 0.25));
    assert_eq!(
        rewarded(6, verdict(Verdict::OverBudget), right()).1,
        [-2.0, 0.5],
        "no verdict but right is right"
    );
}

#[test]
fn scores_of_a_reward_model_replace_its_reward_alone() {
    let rewards = "rewards=[{name=\"rule\",weight=2.0},{name=\"scored\",verifier={kind=\"reward-model\",model=\"m\",normalise=\"none\"}}]";
    let overlong = "rollout.overlong={max_tokens=10,buffer_tokens=4}";
    let plan = Plan::resolve(Config::from_toml("", [rewards, overlong]).unwrap()).unwrap();
    let member = |score: f64| {
        let opinion =
            Some(Box::new(JudgeOpinion { score: Some(score), ..JudgeOpinion::of_rule(Verdict::Wrong) }));
        let by_model = Judged { reward: Some(score), judge: opinion, ..verdict(Verdict::Wrong) };
        scored(&plan, judged(8, vec![verdict(Verdict::Right), by_model]))
    };
    let problem =
        Task::open(&crate::tasks::TaskSpec::default()).unwrap().problem(7, Split::Train, 0).unwrap();
    let members = vec![member(1.0), member(30.0)];
    assert_eq!(members[0].judge.as_ref().unwrap().rule, Verdict::Right, "the first verifier is the rule");
    let mut batch = Batch { groups: vec![stapo_core::Group { problem, members }] };
    reward_scores(&plan, &mut batch, &mut ScoreMoments::default());
    let found: Vec<(Vec<f64>, f64)> = batch.responses().map(|s| (s.rewards.clone(), s.reward)).collect();
    // The rule's reward keeps the penalty of its length; scores are cut at 10.
    assert_eq!(found, [(vec![0.5, 1.0], 2.0), (vec![0.5, 10.0], 11.0)]);

    let alone = "task.verifier={kind=\"reward-model\",model=\"m\",normalise=\"none\"}";
    let plan = Plan::resolve(Config::from_toml("", [alone, overlong]).unwrap()).unwrap();
    reward_scores(&plan, &mut batch, &mut ScoreMoments::default());
    assert_eq!(
        batch.responses().map(|s| s.reward).collect::<Vec<_>>(),
        [0.5, 9.5],
        "the first reward bears it"
    );
}

/// Who judges in addition to a judge is its rule; a judge in the first place has a rule of its own.
#[test]
fn the_rule_beside_a_judge_is_the_first_verifier() {
    let by_judge =
        Judged { judge: Some(Box::new(JudgeOpinion::of_rule(Verdict::NoAnswer))), ..verdict(Verdict::Wrong) };
    let rule = |judged: &[Judged]| opinion(judged).map(|opinion| opinion.rule);
    assert_eq!(rule(&[verdict(Verdict::Right), by_judge.clone()]), Some(Verdict::Right));
    assert_eq!(rule(&[by_judge, verdict(Verdict::Right)]), Some(Verdict::NoAnswer));
    assert_eq!(rule(&[verdict(Verdict::Right)]), None);
}

#[test]
fn the_share_of_right_verdicts_is_of_all() {
    use Verdict::{NoAnswer, OverBudget, Right, Unparsable, Wrong};
    assert_eq!(share_right([Right, Wrong, NoAnswer, Unparsable, OverBudget].into_iter()), 0.2);
    assert_eq!(share_right([].into_iter()), 0.0);
}
