//! Dealing work out to ranks. Who does a piece of work changes no bit of its result.

use std::collections::HashMap;

/// For each piece of work the rank that does it: the largest first, each to the rank that has the least so far.
pub fn deal(sizes: &[f64], world: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|&a, &b| sizes[b].total_cmp(&sizes[a]).then(a.cmp(&b)));
    let mut load = vec![0.0_f64; world];
    let mut owners = vec![0; sizes.len()];
    for idx in order {
        let mut least = 0;
        for rank in 1..world {
            if load[rank] < load[least] {
                least = rank;
            }
        }
        owners[idx] = least;
        load[least] += sizes[idx];
    }
    owners
}

/// How long responses to a problem are, as far as this process has seen. All ranks see the same responses, so that they
/// deal the same way. A resumed run begins to learn the lengths again.
#[derive(Debug, Default)]
pub struct ExpectedLengths {
    /// Mean response tokens by problem.
    of_problem: HashMap<String, f64>,
    n_tokens: f64,
    n_responses: f64,
}

impl ExpectedLengths {
    /// Takes the lengths of the responses to one problem.
    pub fn saw(&mut self, problem_id: &str, lengths: impl Iterator<Item = usize>) {
        let (mut n_tokens, mut n_responses) = (0.0, 0.0);
        for length in lengths {
            n_tokens += length as f64;
            n_responses += 1.0;
        }
        if n_responses > 0.0 {
            self.of_problem.insert(problem_id.to_string(), n_tokens / n_responses);
        }
        self.n_tokens += n_tokens;
        self.n_responses += n_responses;
    }

    /// The tokens of a response to expect: those of the problem's last responses, or else the mean of all.
    pub fn expected(&self, problem_id: &str) -> f64 {
        let mean = if self.n_responses > 0.0 { self.n_tokens / self.n_responses } else { 1.0 };
        self.of_problem.get(problem_id).copied().unwrap_or(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_ones_are_spread() {
        assert_eq!(deal(&[1.0, 9.0, 1.0, 8.0, 1.0], 2), [1, 0, 0, 1, 1]);
        assert_eq!(deal(&[1.0; 5], 3), [0, 1, 2, 0, 1]);
        assert_eq!(deal(&[2.0, 1.0], 1), [0, 0]);
        assert!(deal(&[], 4).is_empty());
    }

    #[test]
    fn lengths_are_those_last_seen_or_the_mean() {
        let mut lengths = ExpectedLengths::default();
        assert_eq!(lengths.expected("a"), 1.0);
        lengths.saw("a", [10, 30].into_iter());
        assert_eq!((lengths.expected("a"), lengths.expected("b")), (20.0, 20.0));
        lengths.saw("b", [50, 50].into_iter());
        lengths.saw("a", [4].into_iter());
        assert_eq!((lengths.expected("a"), lengths.expected("c")), (4.0, 144.0 / 5.0));
    }
}
