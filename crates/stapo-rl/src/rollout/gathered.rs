//! Judged responses as messages between ranks.

use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{RankError, Transport};
use stapo_core::{Finish, Rollout, Scored, Verdict};

const VERDICTS: [Verdict; 5] =
    [Verdict::Right, Verdict::Wrong, Verdict::NoAnswer, Verdict::Unparsable, Verdict::OverBudget];

/// The error of a rank whose message makes no sense.
pub fn unreadable(rank: usize) -> RankError {
    RankError { rank, problem: "sent responses that cannot be read".into() }
}

/// The judged responses of all ranks to `n_problems` problems, ordered by problem and sample.
pub fn gathered(ranks: &dyn Transport, own: &[Scored], n_problems: usize) -> Result<Vec<Scored>, RankError> {
    let mut packer = Packer::default();
    for scored in own {
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
    let Scored { rollout, verdict, reward, rewards } = scored;
    packer.number(rollout.problem_idx);
    packer.number(rollout.sample_idx);
    packer.tokens(&rollout.prompt_tokens);
    packer.tokens(&rollout.tokens);
    packer.singles(&rollout.logp);
    packer.singles(&rollout.entropy);
    let stop = match rollout.finish {
        Finish::Stop { token } => vec![token],
        Finish::LengthLimit => Vec::new(),
    };
    packer.tokens(&stop);
    packer.number(rollout.policy_version as usize);
    packer.number(VERDICTS.iter().position(|known| known == verdict).unwrap_or(VERDICTS.len()));
    packer.float(*reward);
    packer.floats(rewards);
}

fn unpack(read: &mut Unpacker) -> Result<Scored, Malformed> {
    let rollout = Rollout {
        problem_idx: read.number()?,
        sample_idx: read.number()?,
        prompt_tokens: read.tokens()?,
        tokens: read.tokens()?,
        logp: read.singles()?,
        entropy: read.singles()?,
        finish: read.tokens()?.first().map_or(Finish::LengthLimit, |&token| Finish::Stop { token }),
        policy_version: read.number()? as u64,
    };
    let is_whole =
        rollout.logp.len() == rollout.tokens.len() && rollout.entropy.len() == rollout.tokens.len();
    let verdict = *VERDICTS.get(read.number()?).filter(|_| is_whole).ok_or(Malformed)?;
    Ok(Scored { rollout, verdict, reward: read.float()?, rewards: read.floats()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Solo;

    #[test]
    fn a_response_survives_the_way_between_ranks() {
        let rollout = |problem_idx, finish| Rollout {
            problem_idx,
            sample_idx: 1,
            prompt_tokens: vec![5],
            tokens: vec![1, 2],
            logp: vec![-0.0, -1.25],
            entropy: vec![0.5, 1e-30],
            finish,
            policy_version: 9,
        };
        let of = |rollout, verdict| Scored { rollout, verdict, reward: -1.0, rewards: vec![0.5, -1.5] };
        let second = of(rollout(1, Finish::LengthLimit), Verdict::OverBudget);
        let first = of(rollout(0, Finish::Stop { token: 2 }), Verdict::Right);
        let all = gathered(&Solo, &[second.clone(), first.clone()], 2).unwrap();
        assert_eq!(all, [first, second.clone()]);
        assert_eq!(gathered(&Solo, &[second], 1).unwrap_err().rank, 0, "a problem that nobody asked");
    }
}
