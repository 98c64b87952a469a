//! Times until an event, of which some are known only to be longer than the observation: survival curves and the test of
//! whether groups differ in them.

use super::bootstrap::Resampling;
use super::distribution::{chi_squared_upper, normal_quantile};
use super::error::{all_finite, at_least, open_unit};
use super::{Interval, StatsError};
use crate::random::Key;
use serde::{Deserialize, Serialize};

/// How long a unit, such as a run, was observed, and whether the event ended it. A unit without an event is censored: its
/// event comes after `time`, or never.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lifetime {
    pub time: f64,
    pub is_event: bool,
}

/// The survival curve from one time with an event to the next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SurvivalStep {
    pub time: f64,
    /// The share of units without an event up to and including `time`.
    pub survival: f64,
    /// Absent if no or every unit at risk had its event: Greenwood's variance has no interval there.
    pub interval: Option<Interval>,
    /// Units under observation just before `time`, and their events at `time`.
    pub n_at_risk: usize,
    pub n_events: usize,
}

/// Kaplan and Meier's estimate (1958): `S(t) = prod (1 - d_i / n_i)` over the times with events up to t. The interval is
/// that of `ln(-ln S)` with Greenwood's variance, so it stays within 0 to 1. Times without events have no step.
pub fn kaplan_meier(lifetimes: &[Lifetime], level: f64) -> Result<Vec<SurvivalStep>, StatsError> {
    check(lifetimes.iter())?;
    open_unit("level", level)?;
    let mut events: Vec<f64> = lifetimes.iter().filter(|l| l.is_event).map(|l| l.time).collect();
    events.sort_by(f64::total_cmp);
    events.dedup();
    let z = normal_quantile(0.5 + 0.5 * level);
    let mut survival = 1.0;
    let mut greenwood = 0.0;
    let mut steps = Vec::new();
    for time in events {
        let n_at_risk = lifetimes.iter().filter(|l| l.time >= time).count();
        let n_events = lifetimes.iter().filter(|l| l.is_event && l.time == time).count();
        let (n, d) = (n_at_risk as f64, n_events as f64);
        survival *= 1.0 - d / n;
        greenwood += d / (n * (n - d));
        let interval = (survival > 0.0 && survival < 1.0).then(|| {
            let log = survival.ln();
            let shift = z * greenwood.sqrt() / log.abs();
            let bound = |sign: f64| (log * libm::exp(sign * shift)).exp();
            Interval { low: bound(1.0), high: bound(-1.0), level }
        });
        steps.push(SurvivalStep { time, survival, interval, n_at_risk, n_events });
    }
    Ok(steps)
}

/// A unit in a comparison of groups. Units are compared within their stratum, such as a learning rate, alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Subject {
    /// From 0, without gaps.
    pub group: usize,
    pub stratum: usize,
    pub lifetime: Lifetime,
}

/// The log-rank test of "all groups have one survival curve".
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogRank {
    /// Observed minus expected events of group 0: positive where its units have their events early.
    pub excess: f64,
    /// Chi-squared, with `freedom` degrees of freedom.
    pub statistic: f64,
    pub freedom: usize,
    /// Of the chi-squared distribution, which a few events do not reach yet.
    pub p_value: f64,
    /// Over random exchanges of the groups within each stratum, the observed one counted among them: valid for any number
    /// of units.
    pub p_permutation: f64,
    pub n_events: usize,
}

/// The log-rank test (Mantel 1966), stratified: observed minus expected events of each group, summed over the times with
/// events and over the strata, in the metric of their hypergeometric covariance. Without an event p is 1.
pub fn log_rank(subjects: &[Subject], resampling: &Resampling) -> Result<LogRank, StatsError> {
    check(subjects.iter().map(|subject| &subject.lifetime))?;
    resampling.check()?;
    let n_groups = subjects.iter().map(|subject| subject.group + 1).max().unwrap_or(0);
    at_least("groups", 2, n_groups)?;
    let tables = event_tables(subjects);
    let mut groups: Vec<usize> = subjects.iter().map(|subject| subject.group).collect();
    let (excess, covariance) = excess(&tables, &groups, n_groups);
    let first_excess = excess[0];
    let (statistic, freedom) = quadratic_form(covariance, excess);
    let strata = strata(subjects);
    let draw = Key::new(resampling.seed);
    let mut n_hits = 0;
    for round in 0..resampling.n_resamples as u64 {
        for (number, members) in strata.iter().enumerate() {
            let mut stratum_groups: Vec<usize> = members.iter().map(|&idx| groups[idx]).collect();
            draw.with(round).with(number as u64).shuffle(&mut stratum_groups);
            members.iter().zip(stratum_groups).for_each(|(&idx, group)| groups[idx] = group);
        }
        // Equal statistics may differ in their last bits, since sums run in another order.
        let (excess, covariance) = self::excess(&tables, &groups, n_groups);
        n_hits += usize::from(quadratic_form(covariance, excess).0 >= statistic * (1.0 - 1e-9) - 1e-12);
    }
    Ok(LogRank {
        excess: first_excess,
        statistic,
        freedom,
        p_value: if freedom == 0 { 1.0 } else { chi_squared_upper(statistic, freedom as f64) },
        p_permutation: (1 + n_hits) as f64 / (1 + resampling.n_resamples) as f64,
        n_events: subjects.iter().filter(|subject| subject.lifetime.is_event).count(),
    })
}

fn check<'a>(lifetimes: impl Iterator<Item = &'a Lifetime>) -> Result<(), StatsError> {
    let times: Vec<f64> = lifetimes.map(|lifetime| lifetime.time).collect();
    at_least("lifetimes", 1, times.len())?;
    all_finite("lifetimes", &times)?;
    match times.iter().find(|time| **time < 0.0) {
        Some(&value) => {
            Err(StatsError::OutOfRange { what: "lifetimes", value, expected: "a time of at least 0" })
        }
        None => Ok(()),
    }
}

/// The members of each stratum.
fn strata(subjects: &[Subject]) -> Vec<Vec<usize>> {
    let n_strata = subjects.iter().map(|subject| subject.stratum + 1).max().unwrap_or(0);
    let mut members = vec![Vec::new(); n_strata];
    for (idx, subject) in subjects.iter().enumerate() {
        members[subject.stratum].push(idx);
    }
    members
}

/// One time with an event in one stratum: who was at risk, and who had the event.
struct EventTable {
    at_risk: Vec<usize>,
    with_event: Vec<usize>,
}

fn event_tables(subjects: &[Subject]) -> Vec<EventTable> {
    let mut tables = Vec::new();
    for members in strata(subjects) {
        let life = |idx: &usize| subjects[*idx].lifetime;
        let mut times: Vec<f64> =
            members.iter().map(life).filter(|life| life.is_event).map(|life| life.time).collect();
        times.sort_by(f64::total_cmp);
        times.dedup();
        for time in times {
            let at_risk = members.iter().filter(|idx| life(idx).time >= time).copied().collect();
            let is_now = |idx: &&usize| life(idx).is_event && life(idx).time == time;
            let with_event = members.iter().filter(is_now).copied().collect();
            tables.push(EventTable { at_risk, with_event });
        }
    }
    tables
}

/// Observed minus expected events of each of these groups, and their covariance.
fn excess(tables: &[EventTable], groups: &[usize], n_groups: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut excess = vec![0.0; n_groups];
    let mut covariance = vec![vec![0.0; n_groups]; n_groups];
    for table in tables {
        let n = table.at_risk.len() as f64;
        let d = table.with_event.len() as f64;
        let mut share = vec![0.0; n_groups];
        for &idx in &table.at_risk {
            share[groups[idx]] += 1.0 / n;
        }
        for &idx in &table.with_event {
            excess[groups[idx]] += 1.0;
        }
        let spread = if n > 1.0 { d * (n - d) / (n - 1.0) } else { 0.0 };
        for a in 0..n_groups {
            excess[a] -= d * share[a];
            for b in 0..n_groups {
                let diagonal = if a == b { share[a] } else { 0.0 };
                covariance[a][b] += spread * (diagonal - share[a] * share[b]);
            }
        }
    }
    (excess, covariance)
}

/// `x' C^- x` and the rank of C, for a covariance C whose rows sum to 0, by Gaussian elimination with the largest
/// remaining diagonal element first. Directions without variance are left out.
fn quadratic_form(mut c: Vec<Vec<f64>>, mut x: Vec<f64>) -> (f64, usize) {
    let largest = (0..x.len()).map(|i| c[i][i]).fold(0.0, f64::max);
    let mut left: Vec<usize> = (0..x.len()).collect();
    let mut sum = 0.0;
    let mut rank = 0;
    while let Some(place) =
        (0..left.len()).max_by(|&a, &b| c[left[a]][left[a]].total_cmp(&c[left[b]][left[b]]))
    {
        let pivot = left.swap_remove(place);
        let variance = c[pivot][pivot];
        if variance <= 1e-10 * largest {
            break;
        }
        sum += x[pivot] * x[pivot] / variance;
        rank += 1;
        for &row in &left {
            let factor = c[row][pivot] / variance;
            x[row] -= factor * x[pivot];
            for &column in &left {
                c[row][column] -= factor * c[pivot][column];
            }
        }
    }
    (sum, rank)
}
