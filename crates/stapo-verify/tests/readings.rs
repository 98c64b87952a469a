//! How every case and some thousand random texts are read and judged, to the last word: the verdict alone often stays the same where
//! a rule is broken. A grading repeats itself on every machine, so that `readings.tsv` has sums over all that is found.

use crate::cases::cases;
use stapo_verify::{Fallback, Form, Mode, Order, Rounding, Rules, extract, grade, grade_answer, reading};
use std::collections::BTreeMap;
use std::fmt::{Debug, Write};

include!("hostile/fragments.rs");

/// A sum over bytes (FNV-1a).
struct Sum(u64);

impl Sum {
    fn add(&mut self, found: impl Debug) {
        for byte in format!("{found:?}").bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn of(find: impl FnOnce(&mut Self)) -> String {
        let mut sum = Self(0xcbf2_9ce4_8422_2325);
        find(&mut sum);
        format!("{:08x}", sum.0 ^ (sum.0 >> 32) & 0xffff_ffff)[..8].to_owned()
    }

    /// All that is found about an answer, except by its own rules.
    fn pair(&mut self, answer: &str, reference: &str) {
        let loose = Rules { rounding: Rounding::ShownDigits, form: Form::WorkedOut, ..Rules::default() };
        self.add(grade_answer(reference, answer, loose));
        for mode in Mode::ALL {
            self.add((mode != Mode::Math).then(|| grade_answer(answer, reference, mode)));
        }
        self.add(reading(answer));
    }

    fn response(&mut self, response: &str, reference: &str) {
        for order in [Order::BoxFirst, Order::LineFirst] {
            for fallback in [Fallback::Nothing, Fallback::LastNumber, Fallback::LastFormula] {
                self.add(extract(response, order, fallback));
            }
        }
        Mode::ALL.iter().for_each(|mode| self.add(grade(response, reference, *mode)));
    }
}

/// Compares sums with those of the table whose names begin with `part`.
fn check(part: &str, found: &[(String, String, String)]) {
    let table = include_str!("readings.tsv").lines().filter_map(|line| line.split_once('\t'));
    let expected: BTreeMap<&str, &str> = table.filter(|(name, _)| name.starts_with(part)).collect();
    let mut changed = String::new();
    for (name, sum, shown) in found {
        if expected.get(name.as_str()) != Some(&sum.as_str()) {
            writeln!(changed, "{name}\t{sum}\t{shown}").unwrap();
        }
    }
    assert!(
        changed.is_empty(),
        "read or judged otherwise than before; where that is meant, the lines are now:\n{changed}"
    );
    assert_eq!(found.len(), expected.len());
}

#[test]
fn every_case_is_read_as_before() {
    let mut files: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for case in cases() {
        let file = case.place.split(':').next().unwrap_or_default().to_owned();
        files.entry(file).or_default().push(case);
    }
    let mut found = vec![];
    for (file, cases) in files {
        // Ten lines of a file have a sum.
        for (idx, cases) in cases.chunks(10).enumerate() {
            let sum = Sum::of(|sum| {
                for (line, case) in cases.iter().enumerate() {
                    sum.add(case.run());
                    sum.pair(&case.text, &case.reference);
                    // Nearly the same texts, which are wrong for the most part.
                    let mut random = Random(line as u64);
                    let text = random.mutated(&case.text);
                    sum.add(grade_answer(&text, &case.reference, Mode::Math));
                    sum.add(grade_answer(&case.reference, &random.mutated(&case.reference), Mode::Math));
                    sum.response(
                        &format!("{text} Answer: {}\n\\boxed{{{text}}}", case.text),
                        &case.reference,
                    );
                }
            });
            found.push((format!("case {file} {idx}"), sum, format!("{} and after", cases[0].place)));
        }
    }
    check("case", &found);
}

#[test]
fn random_texts_are_read_as_before() {
    let mut found = vec![];
    for block in 0..100 {
        let sum = Sum::of(|sum| {
            for seed in 40 * block..40 * (block + 1) {
                let mut random = Random(seed);
                let reference = random.expression(0);
                let answer = if seed % 2 == 0 { random.mutated(&reference) } else { random.text() };
                sum.add(grade_answer(&answer, &reference, Mode::Math));
                sum.pair(&answer, &reference);
                let response =
                    format!("Then {}.\nSo {answer}, the answer is $\\boxed{{{reference}", random.text());
                sum.response(&random.mutated(&format!("{response}}}$ or {answer}.")), &reference);
            }
        });
        found.push((format!("random {block}"), sum, format!("seeds {} and after", 40 * block)));
    }
    check("random", &found);
}
