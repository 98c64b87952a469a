//! Judged responses as messages between ranks.

use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{RankError, Transport};
use stapo_core::{Rollout, Scored, Verdict};

const VERDICTS: [Verdict; 5] =
    [Verdict::Right, Verdict::Wrong, Verdict::NoAnswer, Verdict::Unparsable, Verdict::OverBudget];

/// The error of a rank whose message makes no sense.
pub fn unreadable(rank: usize) -> RankError {
    RankError { rank, problem: "sent responses that cannot be read".into() }
}

/// The judged responses of all ranks, this rank's `mine`, to `n_problems` problems, ordered by problem and sample.
pub fn gathered(ranks: &dyn Transport, mine: &[Scored], n_problems: usize) -> Result<Vec<Scored>, RankError> {
    let mut packer = Packer::default();
    for scored in mine {
        pack(&mut packer, scored);
    }
    let mut all = Vec::new();
    for (rank, bytes) in ranks.all_gather(&packer.0)?.iter().enumerate() {
        let mut read = Unpacker(bytes);
        while !read.is_empty() {
            let scored = unpack(&mut read).ok().filter(|scored| scored.rollout.problem_idx < n_problems);
            all.push(scored.ok_or_else(|| unreadable(rank))?);
        }
    }
    all.sort_by_key(|scored| (scored.rollout.problem_idx, scored.rollout.sample_idx));
    Ok(all)
}

fn pack(packer: &mut Packer, scored: &Scored) {
    let Scored { rollout, verdict, reward, rewards, program, judge, episode } = scored;
    packer.number(rollout.problem_idx);
    packer.number(rollout.sample_idx);
    packer.tokens(&rollout.tokens);
    packer.bytes(&rollout.is_sampled.iter().map(|&is_sampled| u8::from(is_sampled)).collect::<Vec<_>>());
    packer.singles(&rollout.logp);
    packer.singles(&rollout.entropy);
    packer.number(rollout.kept.len());
    rollout.kept.iter().for_each(|kept| packer.tokens(kept));
    packer.text(&serde_json::to_string(&rollout.finish).expect("names and numbers are JSON"));
    packer.byte(u8::from(rollout.policy_version.is_some()));
    packer.number(rollout.policy_version.unwrap_or(0) as usize);
    packer.number(VERDICTS.iter().position(|known| known == verdict).unwrap_or(VERDICTS.len()));
    packer.float(*reward);
    packer.floats(rewards);
    packer.text(&serde_json::to_string(program).expect("texts and numbers are JSON"));
    packer.text(&serde_json::to_string(judge).expect("texts and numbers are JSON"));
    packer.text(&serde_json::to_string(episode).expect("texts and numbers are JSON"));
}

fn unpack(read: &mut Unpacker) -> Result<Scored, Malformed> {
    let rollout = Rollout {
        problem_idx: read.number()?,
        sample_idx: read.number()?,
        tokens: read.tokens()?,
        is_sampled: read.bytes()?.iter().map(|&byte| byte != 0).collect(),
        logp: read.singles()?,
        entropy: read.singles()?,
        kept: {
            let n_kept = read.number()?;
            (0..n_kept).map(|_| read.tokens()).collect::<Result<_, _>>()?
        },
        finish: serde_json::from_str(&read.text()?).map_err(|_| Malformed)?,
        policy_version: {
            let is_known = read.byte()? != 0;
            Some(read.number()? as u64).filter(|_| is_known)
        },
    };
    let n_sampled = rollout.n_sampled();
    let is_whole = rollout.is_sampled.len() == rollout.tokens.len()
        && rollout.is_sampled.first() == Some(&false)
        && rollout.logp.len() == n_sampled
        && rollout.entropy.len() == n_sampled
        && (rollout.kept.is_empty() || rollout.kept.len() == n_sampled);
    let verdict = *VERDICTS.get(read.number()?).filter(|_| is_whole).ok_or(Malformed)?;
    let (reward, rewards) = (read.float()?, read.floats()?);
    let program = serde_json::from_str(&read.text()?).map_err(|_| Malformed)?;
    let judge = serde_json::from_str(&read.text()?).map_err(|_| Malformed)?;
    let episode = serde_json::from_str(&read.text()?).map_err(|_| Malformed)?;
    Ok(Scored { rollout, verdict, reward, rewards, program, judge, episode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Solo;
    use stapo_core::{Episode, Finish, JudgeOpinion, ProgramEnd, ProgramRun};

    #[test]
    fn a_response_survives_the_way_between_ranks() {
        let rollout = |problem_idx, finish, policy_version| Rollout {
            problem_idx,
            sample_idx: 1,
            tokens: vec![5, 1, 7, 2],
            is_sampled: vec![false, true, false, true],
            logp: vec![-0.0, -1.25],
            entropy: vec![0.5, 1e-30],
            kept: if problem_idx == 0 { vec![vec![1, 4], vec![0, 2, 9]] } else { vec![] },
            finish,
            policy_version,
        };
        let judged = |rollout, verdict| Scored {
            rollout,
            verdict,
            reward: -1.0,
            rewards: vec![0.5, -1.5],
            program: None,
            judge: None,
            episode: None,
        };
        let mut second = judged(rollout(1, Finish::TurnLimit, None), Verdict::OverBudget);
        let margin = Some(0.1 + 0.2);
        second.judge =
            Some(Box::new(JudgeOpinion { margin, score: margin, ..JudgeOpinion::of_rule(Verdict::Wrong) }));
        second.episode = Some(Box::new(Episode::default()));
        second.program = Some(Box::new(ProgramRun {
            source: "x = 1".into(),
            end: ProgramEnd::TimeOut,
            failing_test: Some("assert x".into()),
            printed: "1".into(),
            cpu_seconds: 3.5,
        }));
        let first = judged(rollout(0, Finish::Stop { token: 2 }, Some(0)), Verdict::Right);
        let all = gathered(&Solo, &[second.clone(), first.clone()], 2).unwrap();
        assert_eq!(all, [first.clone(), second.clone()]);
        assert_eq!(gathered(&Solo, &[second], 1).unwrap_err().rank, 0, "a problem that nobody asked");
        let tears: [fn(&mut Rollout); 7] = [
            |torn| torn.is_sampled[2] = true,
            |torn| torn.is_sampled[0] = true,
            |torn| torn.is_sampled.truncate(3),
            |torn| torn.tokens.push(3),
            |torn| torn.logp.push(-1.0),
            |torn| torn.entropy.push(0.5),
            |torn| torn.kept.truncate(1),
        ];
        for (idx, tear) in tears.into_iter().enumerate() {
            let mut torn = first.clone();
            tear(&mut torn.rollout);
            assert_eq!(gathered(&Solo, &[torn], 2).unwrap_err().rank, 0, "tear {idx}");
        }
        // Every column fits the three tokens that are marked as sampled.
        let mut torn = first;
        torn.rollout.is_sampled[0] = true;
        torn.rollout.logp.push(-1.0);
        torn.rollout.entropy.push(0.5);
        torn.rollout.kept.push(vec![1]);
        assert_eq!(gathered(&Solo, &[torn], 2).unwrap_err().rank, 0, "a response without a prompt");
    }
}
