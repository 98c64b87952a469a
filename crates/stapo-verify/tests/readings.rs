//! How every case and some thousand random texts are read and judged, to the last word: the verdict alone often stays the same where
//! a rule is broken. A grading repeats itself on every machine, so that `readings.tsv` has sums over all that is found.

use crate::cases::cases;
use stapo_verify::{
    Fallback, Form, Mode, Order, Reference, Rounding, Rules, extract, grade, grade_answer, reading,
};
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
        for mode in Mode::ALL {
            self.add(grade(response, reference, mode));
        }
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
                    for _ in 0..3 {
                        let (text, reference) = (random.mutated(&case.text), random.mutated(&case.reference));
                        sum.add(grade_answer(&text, &case.reference, Mode::Math));
                        sum.add(grade_answer(&case.reference, &reference, Mode::Math));
                    }
                    let text = random.mutated(&case.text);
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

/// Pairs of an answer and a reference that are near a rule, whatever the verdict is.
#[test]
fn odd_texts_are_read_as_before() {
    let pairs: Vec<(&str, &str)> =
        include_str!("readings_odd.tsv").lines().filter_map(|line| line.split_once('\t')).collect();
    let worked_out = Rules { form: Form::WorkedOut, ..Rules::default() };
    let mut found = vec![];
    for (idx, pairs) in pairs.chunks(4).enumerate() {
        let sum = Sum::of(|sum| {
            for (answer, reference) in pairs {
                sum.add(grade_answer(answer, *reference, Mode::Math));
                sum.add(grade_answer(reference, *answer, Mode::Math));
                sum.add(grade_answer(answer, *reference, worked_out));
                sum.pair(answer, reference);
                sum.response(&format!("We get \\({reference}\\). So it is ${answer}$"), reference);
            }
        });
        found.push((format!("odd {idx}"), sum, format!("{} and after", pairs[0].0)));
    }
    for (idx, response) in RESPONSES.iter().enumerate() {
        let sum =
            Sum::of(|sum| ["5", "6", "1, 2"].iter().for_each(|reference| sum.response(response, reference)));
        found.push((format!("odd response {idx}"), sum, (*response).to_owned()));
    }
    check("odd", &found);
}

const RESPONSES: [&str; 30] = [
    "the answer is $5$ and $$7$$",
    "\\boxed 5",
    "\\boxed",
    "\\boxed x",
    "\\boxed$",
    "\\boxed{}",
    "\\[ 5 \\] then $6",
    "$ $ 5",
    "$$$$ 5",
    "So $$5$$",
    "So $5$ $",
    "so \\(5\\) and \\( \\)",
    "\\boxed{1}\n\\boxed{2}",
    "\\boxed{1}\n(2) \\boxed{2}",
    "(1) $\\boxed{1}$\n(2) $\\boxed{2}$",
    "(1) $\\boxed{1}$\n\n(2) $\\boxed{2}$",
    "\\boxed{1} \\text{ and } \\boxed{2}",
    "x=\\boxed{1}, y=\\boxed{2}",
    "\\boxed{1}, but \\boxed{2}",
    "I doubt the answer is 5. The answer is 6.",
    "I doubt that the answer is 5.",
    "It is unlikely that the answer is 5.",
    "I do not doubt that the answer is 5.",
    "There is no doubt the answer is 5.",
    "I think it is doubtful that the answer is 5.",
    "I think the answer is 5 without doubt.",
    "The answer is not \\boxed{5}.",
    "either \\boxed{6} or $5$",
    "Answer: 5\nAnswer: 6",
    "**Answer:** $5$ or maybe 6.",
];

/// Texts at the limits of what is read, one below and one above, by what they reach.
fn at_limits() -> Vec<(&'static str, Vec<String>)> {
    let around =
        |limit: usize, text: &dyn Fn(usize) -> String| (limit - 1..=limit + 2).map(text).collect::<Vec<_>>();
    let joined = |n: usize, mark: &str, item: &dyn Fn(usize) -> String| {
        (0..n).map(item).collect::<Vec<_>>().join(mark)
    };
    let ones = |n: usize| joined(n, "+", &|_| "1".into());
    let cells = |rows: usize, columns: usize, cell: &str| {
        let row = joined(columns, "&", &|_| cell.into());
        format!("\\begin{{pmatrix}}{}\\end{{pmatrix}}", joined(rows, "\\\\", &|_| row.clone()))
    };
    let intervals = |n: usize, mark: &str| joined(n, mark, &|i| format!("({},{})", 2 * i, 2 * i + 1));
    let nested = |n: usize, open: &str, close: &str| format!("{}1{}", open.repeat(n), close.repeat(n));
    vec![
        ("lines", around(199, &ones)),
        ("phrases", around(80, &|n| format!("no{}solution", " ".repeat(n - 10)))),
        ("sides", around(127, &|n| format!("{} \\text{{ apples}} = y", ones(n)))),
        ("names behind", around(127, &|n| format!("y = {} q", ones(n)))),
        ("long entries", around(1998, &|n| format!("{}{}", cells(2, 1, &ones(n)), cells(1, 5, "1")))),
        ("rows", around(256, &|n| cells(n, 1, "1"))),
        ("columns", around(16, &|n| cells(16, n, "1"))),
        ("sets in sets", around(12, &|n| nested(n, "\\{", "\\}"))),
        ("tuples in tuples", around(12, &|n| nested(n, "(2,", ")"))),
        (
            "cases",
            around(256, &|n| {
                format!("\\begin{{cases}}{}\\end{{cases}}", joined(n, "\\\\", &|i| format!("{i}&x={i}")))
            }),
        ),
        ("elements", around(256, &|n| format!("({})", joined(n, ",", &|i| i.to_string())))),
        ("listed", around(256, &|n| joined(n, ", ", &|i| i.to_string()))),
        ("ratios", around(16, &|n| joined(n, ":", &|i| (i + 2).to_string()))),
        ("alternatives", around(16, &|n| joined(n, " or ", &|i| format!("{}<x<{}", 2 * i, 2 * i + 1)))),
        ("unions", around(16, &|n| format!("({})\\cap({})", intervals(16, "\\cup"), intervals(n, "\\cup")))),
        ("terms", around(500, &|n| format!("\\sum_{{k=0}}^{{{n}}} k"))),
        ("products", around(500, &|n| format!("\\prod_{{k=1}}^{{{n}}} 1"))),
        ("bytes", around(1 << 14, &|n| format!("5{}+1", " ".repeat(n - 3)))),
        ("powers of ten", around(9000, &|n| format!("1e{n}"))),
        ("negative powers of ten", around(9000, &|n| format!("1e-{n}"))),
        ("digits", around(19_000, &|n| format!("{}+1", "7".repeat(n)))),
        ("digits of a base", around(19_000, &|n| format!("{}_{{9}}", "7".repeat(n)))),
        ("fractions of a base", around(300, &|n| format!("0.{}_{{9}}", "7".repeat(n)))),
        ("machine numbers", around(18, &|n| format!("{}/3", "9".repeat(n)))),
        ("nothing", around(256, &|n| ".".repeat(n))),
        ("powers", around(32_768, &|n| format!("2^{{{n}}}"))),
        ("factorials", around(5000, &|n| format!("{n}!/{}!", n - 1))),
        ("brackets", around(95, &|n| nested(n, "(", ")"))),
        ("roots", around(95, &|n| nested(n, "\\sqrt{", "}"))),
        ("signs", around(95, &|n| format!("{}1", "-".repeat(n)))),
        ("signs behind", around(95, &|n| format!("3{}", "'".repeat(n)))),
        ("percent", around(95, &|n| format!("3{}", "\\%".repeat(n)))),
        ("expanded powers", around(400, &|n| format!("(x+1)^{{{n}}}"))),
        ("sums", around(400, &|n| joined(n, "+", &|i| format!("x_{{{i}}}")))),
        (
            "sums of products",
            around(20, &|n| {
                format!(
                    "({})({})",
                    joined(20, "+", &|i| format!("x_{{{i}}}")),
                    joined(n, "+", &|i| format!("y_{{{i}}}"))
                )
            }),
        ),
        ("shown", around(160, &|n| format!("{}é", "a ".repeat(n / 2 - 1)))),
        ("signs to choose", around(4, &|n| format!("1{}", "\\pm 2".repeat(n)))),
        ("choices", around(1000, &|n| format!("C_{{{n}}}^{{2}}"))),
        ("degrees", around(12, &|n| format!("\\int_0^1 x^{{{n}}} dx"))),
        ("exponents", around(40, &|n| format!("e^{{2^{{{n}}}}}"))),
        ("angles", around(64, &|n| format!("\\sin(2^{{{n}}})"))),
        ("floors", around(4096, &|n| format!("\\lfloor \\sqrt{{2}} \\cdot 2^{{{n}}} \\rfloor"))),
        ("groups of digits", around(3, &|n| format!("1_{}", "0".repeat(n)))),
    ]
}

#[test]
fn texts_at_limits_are_read_as_before() {
    let mut found = vec![];
    for (name, texts) in at_limits() {
        for (idx, text) in texts.iter().enumerate() {
            let sum = Sum::of(|sum| {
                let graded = |reference: &str| grade_answer(text, reference, Mode::Math);
                ["1", "5+1", text].map(graded).into_iter().for_each(|graded| sum.add(graded));
                sum.add(grade_answer("x", text, Mode::Math));
                sum.pair(text, "1");
                sum.add(reading(text));
                let with = Reference { answer: "1", problem: Some(&format!("Find ${text}$.")) };
                sum.add(grade_answer(text, with, Rules { form: Form::WorkedOut, ..Rules::default() }));
            });
            found.push((format!("limit {name} {idx}"), sum, format!("{} bytes", text.len())));
        }
    }
    for n in 58..=62 {
        let sum = Sum::of(|sum| {
            let other = format!("6{}", "+0".repeat(n / 2));
            sum.response(
                &format!("either $\\boxed{{6}}$ or {other}{}", if n % 2 == 0 { "." } else { " ." }),
                "6",
            );
            sum.response(&format!("{other} or $\\boxed{{6}}$."), "6");
            sum.response(&format!("$\\boxed{{1}}${}$\\boxed{{2}}$", " ".repeat(n + 16)), "1, 2");
            sum.response(&format!("$\\boxed{{1}}$,{}$\\boxed{{2}}$", " ".repeat(n + 17)), "1, 2");
            sum.response(&"\\boxed{1}, ".repeat(n - 45), "1");
        });
        found.push((format!("limit responses {n}"), sum, String::new()));
    }
    check("limit", &found);
}
