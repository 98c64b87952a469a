//! Two runs' responses compared: lengths, n-grams, distinct answers, and the tokens of each quadrant.

use serde::Serialize;
use stapo_core::diagnostics::{Quadrant, Thresholds};
use stapo_core::random::Key;
use stapo_core::record::{Metrics, ResponseRecord};
use stapo_core::stats::{Estimate, PairedComparison, Resampling, StatsError, compare_paired, mean_estimate};
use stapo_verify::{Rules, grade};
use std::collections::{BTreeMap, BTreeSet, HashMap};

type Result<T> = std::result::Result<T, StatsError>;

/// What a comparison reads of a run.
pub struct RunResponses {
    pub metrics: Vec<Metrics>,
    /// Recorded responses of all steps.
    pub responses: Vec<ResponseRecord>,
    /// Responses per problem, by the plan.
    pub group_size: usize,
    pub tau_p: f64,
}

/// Run B compared with run A. The unit of chance is a step that both runs have; steps of one run follow from each other, so
/// intervals are narrower than those over seeds would be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedRuns {
    pub n_steps: usize,
    /// Steps of which both runs have recorded whole groups.
    pub n_recorded: usize,
    /// Tokens of a response, B minus A, all responses of every step; absent below two steps.
    pub length: Option<PairedComparison>,
    pub length_means: (f64, f64),
    /// For n of 1, 2 and 3.
    pub n_grams: Vec<NGramDivergence>,
    /// Distinct final answers of a group, B minus A; absent below two recorded steps.
    pub distinct_answers: Option<PairedComparison>,
    pub distinct_means: Option<(f64, f64)>,
    /// What divides the tokens of both runs into quadrants; absent if no step of either had an entropy threshold.
    pub thresholds: Option<Thresholds>,
    pub quadrants: Vec<QuadrantShare>,
}

/// The Jensen-Shannon divergence between the runs' distributions of n consecutive tokens, nats, at most ln 2.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NGramDivergence {
    pub n: usize,
    /// The mean over steps.
    pub divergence: Estimate,
    /// The mean of the same where responses are exchanged between the runs at random: what equal policies would show.
    pub by_chance: f64,
    /// The share of such exchanges with at least the divergence observed, which is counted among them.
    pub p_value: f64,
}

/// The share of a quadrant's tokens in the first, middle and last third of the recorded steps, in run A and run B.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct QuadrantShare {
    pub quadrant: Quadrant,
    pub a: [Option<f64>; 3],
    pub b: [Option<f64>; 3],
}

/// Random exchanges of responses.
const N_EXCHANGES: usize = 199;

/// Compares two runs.
pub fn compare_runs(a: &RunResponses, b: &RunResponses, resampling: &Resampling) -> Result<ComparedRuns> {
    let lengths: Vec<(f64, f64)> = shared(&a.metrics, &b.metrics)
        .map(|(a, b)| (a.response_tokens_mean, b.response_tokens_mean))
        .collect();
    let (of_a, of_b) = (whole_groups(a), whole_groups(b));
    let steps: Vec<u64> = of_a.keys().filter(|step| of_b.contains_key(step)).copied().collect();
    let pairs: Vec<(&Groups, &Groups)> = steps.iter().map(|step| (&of_a[step], &of_b[step])).collect();
    let distinct: Vec<(f64, f64)> =
        pairs.iter().map(|(a, b)| (distinct_answers(a), distinct_answers(b))).collect();
    let mut n_grams = Vec::new();
    for n in [1, 2, 3] {
        n_grams.extend(divergence(&pairs, n, resampling.seed)?);
    }
    let thresholds = thresholds(a, b);
    Ok(ComparedRuns {
        n_steps: lengths.len(),
        n_recorded: pairs.len(),
        length: paired(&lengths, resampling)?,
        length_means: means(&lengths).unwrap_or((0.0, 0.0)),
        n_grams,
        distinct_answers: paired(&distinct, resampling)?,
        distinct_means: means(&distinct),
        thresholds,
        quadrants: thresholds.map_or(Vec::new(), |thresholds| quadrants(&pairs, thresholds)),
    })
}

/// The steps that both runs have.
fn shared<'a>(a: &'a [Metrics], b: &'a [Metrics]) -> impl Iterator<Item = (&'a Metrics, &'a Metrics)> {
    let of_b: HashMap<u64, &Metrics> = b.iter().map(|metrics| (metrics.step, metrics)).collect();
    a.iter().filter_map(move |own| Some((own, *of_b.get(&own.step)?)))
}

fn paired(values: &[(f64, f64)], resampling: &Resampling) -> Result<Option<PairedComparison>> {
    if values.len() < 2 {
        return Ok(None);
    }
    let (a, b): (Vec<f64>, Vec<f64>) = values.iter().copied().unzip();
    compare_paired(&a, &b, resampling).map(Some)
}

fn means(values: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = values.len() as f64;
    let sum = values.iter().fold((0.0, 0.0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
    (!values.is_empty()).then_some((sum.0 / n, sum.1 / n))
}

/// The responses of a step by group.
type Groups<'a> = BTreeMap<usize, Vec<&'a ResponseRecord>>;

/// Recorded groups with all their responses, by step. Single responses are recorded because a token of theirs was silenced,
/// which would make runs with a mask look different.
fn whole_groups(run: &RunResponses) -> BTreeMap<u64, Groups<'_>> {
    let mut steps: BTreeMap<u64, Groups> = BTreeMap::new();
    for response in &run.responses {
        let Some(group) = response.group_idx else { continue };
        steps.entry(response.step).or_default().entry(group).or_default().push(response);
    }
    for groups in steps.values_mut() {
        groups.retain(|_, responses| responses.len() == run.group_size);
    }
    steps.retain(|_, groups| !groups.is_empty());
    steps
}

/// The mean number of different answers in a group; no answer is one of them.
fn distinct_answers(groups: &Groups) -> f64 {
    let answer = |response: &&ResponseRecord| {
        let graded = grade(&response.text, &response.reference, Rules::default());
        graded.answer.or(graded.extracted)
    };
    let counts = groups.values().map(|own| own.iter().map(answer).collect::<BTreeSet<_>>().len());
    counts.sum::<usize>() as f64 / groups.len().max(1) as f64
}

/// The responses of a step of both runs as numbers of n-grams; the first `n_first` are of run A.
struct NGramStep {
    responses: Vec<Vec<usize>>,
    n_first: usize,
    n_kinds: usize,
}

impl NGramStep {
    fn new(a: &Groups, b: &Groups, n: usize) -> Self {
        let mut numbers: HashMap<Vec<u32>, usize> = HashMap::new();
        let mut counts_of = |groups: &Groups| -> Vec<Vec<usize>> {
            let responses = groups.values().flatten();
            responses
                .map(|response| {
                    let windows = response.tokens.id.windows(n);
                    windows
                        .map(|gram| {
                            let next = numbers.len();
                            *numbers.entry(gram.to_vec()).or_insert(next)
                        })
                        .collect()
                })
                .collect()
        };
        let first = counts_of(a);
        let second = counts_of(b);
        let n_first = first.len();
        let responses = first.into_iter().chain(second).collect();
        NGramStep { responses, n_first, n_kinds: numbers.len() }
    }

    /// The divergence where the responses `order[..n_first]` are run A's.
    fn divergence(&self, order: &[usize]) -> f64 {
        let count = |own: &[usize]| {
            let mut counts = vec![0.0; self.n_kinds];
            own.iter().flat_map(|&idx| &self.responses[idx]).for_each(|&kind| counts[kind] += 1.0);
            let sum: f64 = counts.iter().sum();
            counts.into_iter().map(|count| count / sum.max(1.0)).collect::<Vec<f64>>()
        };
        let (p, q) = (count(&order[..self.n_first]), count(&order[self.n_first..]));
        let term = |p: f64, m: f64| if p > 0.0 { p * libm::log(p / m) } else { 0.0 };
        let sum: f64 = p.iter().zip(&q).map(|(&p, &q)| term(p, 0.5 * (p + q)) + term(q, 0.5 * (p + q))).sum();
        0.5 * sum
    }
}

fn divergence(pairs: &[(&Groups, &Groups)], n: usize, seed: u64) -> Result<Option<NGramDivergence>> {
    let steps: Vec<NGramStep> = pairs.iter().map(|(a, b)| NGramStep::new(a, b, n)).collect();
    if steps.is_empty() {
        return Ok(None);
    }
    let mut orders: Vec<Vec<usize>> = steps.iter().map(|step| (0..step.responses.len()).collect()).collect();
    let found: Vec<f64> = steps.iter().zip(&orders).map(|(step, order)| step.divergence(order)).collect();
    let divergence = mean_estimate(&found)?;
    let key = Key::new(seed).with(n as u64);
    let mut n_hits = 0;
    let mut sum = 0.0;
    for round in 0..N_EXCHANGES {
        let mut of_round = 0.0;
        for (number, (step, order)) in steps.iter().zip(&mut orders).enumerate() {
            key.with(round as u64).with(number as u64).shuffle(order);
            of_round += step.divergence(order);
        }
        let mean = of_round / steps.len() as f64;
        n_hits += usize::from(mean >= divergence.value);
        sum += mean;
    }
    Ok(Some(NGramDivergence {
        n,
        divergence,
        by_chance: sum / N_EXCHANGES as f64,
        p_value: (1 + n_hits) as f64 / (1 + N_EXCHANGES) as f64,
    }))
}

/// One pair of thresholds for both runs, since their masks may have others: the larger `tau_p` of the plans, and the mean of
/// the entropy thresholds that steps of either run had. `None` if no step had one.
fn thresholds(a: &RunResponses, b: &RunResponses) -> Option<Thresholds> {
    let found: Vec<f64> = a.metrics.iter().chain(&b.metrics).filter_map(|metrics| metrics.tau_h).collect();
    let tau_h = found.iter().sum::<f64>() / found.len() as f64;
    (!found.is_empty()).then_some(Thresholds { tau_p: a.tau_p.max(b.tau_p), tau_h })
}

/// The shares of quadrants among the tokens of whole groups, in thirds of the recorded steps.
fn quadrants(pairs: &[(&Groups, &Groups)], thresholds: Thresholds) -> Vec<QuadrantShare> {
    let (of_a, of_b): (Vec<&Groups>, Vec<&Groups>) = pairs.iter().copied().unzip();
    let of_quadrant = |quadrant: Quadrant| QuadrantShare {
        quadrant,
        a: [0, 1, 2].map(|third| share(&of_a, quadrant, thresholds, third)),
        b: [0, 1, 2].map(|third| share(&of_b, quadrant, thresholds, third)),
    };
    Quadrant::ALL.into_iter().map(of_quadrant).collect()
}

/// The share of a quadrant among the tokens of one third of the steps; `None` if it has no step.
fn share(steps: &[&Groups], quadrant: Quadrant, thresholds: Thresholds, third: usize) -> Option<f64> {
    let steps = &steps[third * steps.len() / 3..(third + 1) * steps.len() / 3];
    let responses = steps.iter().flat_map(|groups| groups.values()).flatten();
    let (mut n_in_quadrant, mut all) = (0, 0);
    for tokens in responses.map(|response| &response.tokens) {
        for (logp, entropy) in tokens.logp.iter().zip(&tokens.entropy) {
            all += 1;
            n_in_quadrant += usize::from(Quadrant::at(*logp, *entropy, thresholds) == quadrant);
        }
    }
    (all > 0).then(|| n_in_quadrant as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A response whose tokens are the bytes of `text`.
    fn response(step: u64, group: usize, sample: usize, text: &str) -> ResponseRecord {
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        serde_json::from_value(json!({"schema": 1, "step": step, "problem_id": "p", "group_idx": group,
            "sample_idx": sample, "prompt": "", "reference": "3", "text": text, "verdict": "right", "reward": 1.0,
            "advantage": 1.0, "finish": {"kind": "length_limit"}, "tokens": {"id": ids, "text": [], "logp": [], "behavior_logp": [],
            "entropy": [], "collision": [], "ratio": [], "kept": [], "silenced_by": [], "clipped": [], "d_logp": []}}))
        .unwrap()
    }

    fn run(texts: &[&str]) -> RunResponses {
        let responses = [1, 2].iter().flat_map(|&step| {
            texts.iter().enumerate().map(move |(idx, text)| response(step, idx / 2, idx % 2, text))
        });
        RunResponses { metrics: Vec::new(), responses: responses.collect(), group_size: 2, tau_p: 0.002 }
    }

    #[test]
    fn equal_runs_do_not_diverge_and_disjoint_ones_do_so_by_ln_two() {
        let texts = ["\\boxed{3}ab", "\\boxed{3}ba", "\\boxed{4}aa", "\\boxed{3}bb"];
        let same = compare_runs(&run(&texts), &run(&texts), &Resampling::default()).unwrap();
        assert_eq!(same.n_recorded, 2);
        assert!(same.n_grams.iter().all(|own| own.divergence.value.abs() < 1e-12 && own.p_value > 0.9));
        // The first group has one answer, the second two.
        assert_eq!(same.distinct_means, Some((1.5, 1.5)));
        let other = compare_runs(&run(&["aaaa"; 8]), &run(&["bbbb"; 8]), &Resampling::default()).unwrap();
        for own in &other.n_grams {
            assert!((own.divergence.value - std::f64::consts::LN_2).abs() < 1e-12, "{own:?}");
            // The mean over all ways to deal 16 responses out: sum over k of C(8,k)^2 / C(16,8) (ln 2 - H(k/8)).
            assert!((own.by_chance - 0.0346).abs() < 0.004 && own.p_value < 0.05, "{own:?}");
        }
    }

    #[test]
    fn quadrants_have_one_pair_of_thresholds_for_both_runs() {
        let token = |logp: f64, entropy: f64| {
            let mut changed = response(1, 0, 0, "a");
            (changed.tokens.logp, changed.tokens.entropy) = (vec![logp; 3], vec![entropy; 3]);
            changed
        };
        let groups = |own| Groups::from([(0, vec![own])]);
        let (sure, typo) = (token(-0.1, 0.1), token(-9.0, 0.1));
        let pairs = [
            (&groups(&sure), &groups(&typo)),
            (&groups(&sure), &groups(&typo)),
            (&groups(&typo), &groups(&sure)),
        ];
        let found = quadrants(&pairs, Thresholds { tau_p: 0.002, tau_h: 0.5 });
        let improbable = found.iter().find(|own| own.quadrant == Quadrant::ImprobableLowEntropy).unwrap();
        assert_eq!(
            (improbable.a, improbable.b),
            ([Some(0.0), Some(0.0), Some(1.0)], [Some(1.0), Some(1.0), Some(0.0)])
        );
    }

    #[test]
    fn single_responses_are_left_out() {
        let mut lone = run(&["aaaa", "aaab"]);
        lone.responses.push(response(1, 7, 0, "zzzz"));
        let groups = whole_groups(&lone);
        assert_eq!(groups[&1].keys().collect::<Vec<_>>(), [&0]);
    }
}
