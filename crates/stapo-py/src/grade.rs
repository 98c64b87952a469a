//! The grader.

use crate::border::{check_signals, refused, without_lock};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyString;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NameError, StrDeserializer};
use stapo_verify::{Fallback, Graded, Mode, Order, Reference, Rules, Verdict as Kind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Responses that a thread takes at a time.
const CHUNK: usize = 16;
/// The most threads of a call, as of `stapo grade`.
const MAX_THREADS: usize = 1024;
/// How often a call looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// What a grading found. True if the answer is right.
///
/// >>> import stapo
/// >>> verdict = stapo.grade(r"so it is \boxed{\frac{1}{2}}", "0.5")
/// >>> verdict.verdict, verdict.extracted, bool(verdict)
/// ('right', '\\frac{1}{2}', True)
/// >>> print(verdict.reason)
/// both are exactly 1/2
#[pyclass(frozen, eq, hash, get_all, module = "stapo")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::struct_field_names, reason = "the attribute is named as in the records of stapo grade")]
pub struct Verdict {
    /// "right", "wrong", "no_answer", "unparsable" or "over_budget".
    verdict: String,
    /// The answer as the response writes it; None if there is none.
    extracted: Option<String>,
    /// One line that says why.
    reason: String,
    /// The answer in one plain notation.
    answer: Option<String>,
    /// The reference in the same notation.
    reference: String,
}

#[pymethods]
impl Verdict {
    #[new]
    #[pyo3(signature = (verdict, extracted=None, reason="", answer=None, reference=""))]
    fn new(
        verdict: String,
        extracted: Option<String>,
        reason: &str,
        answer: Option<String>,
        reference: &str,
    ) -> PyResult<Self> {
        named::<Kind>("verdict", &verdict)?;
        Ok(Self { verdict, extracted, reason: reason.to_string(), answer, reference: reference.to_string() })
    }

    fn __bool__(&self) -> bool {
        self.verdict == "right"
    }

    fn __repr__(&self) -> String {
        format!("<Verdict {}: {}>", self.verdict, self.reason)
    }

    fn __getnewargs__(&self) -> (String, Option<String>, String, Option<String>, String) {
        let Self { verdict, extracted, reason, answer, reference } = self.clone();
        (verdict, extracted, reason, answer, reference)
    }
}

impl From<Graded> for Verdict {
    fn from(graded: Graded) -> Self {
        let verdict = match graded.verdict {
            Kind::Right => "right",
            Kind::Wrong => "wrong",
            Kind::NoAnswer => "no_answer",
            Kind::Unparsable => "unparsable",
            Kind::OverBudget => "over_budget",
        };
        let Graded { extracted, reason, answer, reference, .. } = graded;
        Self { verdict: verdict.to_string(), extracted, reason, answer, reference }
    }
}

/// Finds the answer in a response and compares it with the reference.
///
/// `mode` is math, boxed-exact, dapo, multiple-choice or exact; `order` (box-first, line-first) says which mark of an
/// answer is looked for first, `fallback` (nothing, last-number, last-formula) what to take from a response that marks
/// none, `rounding` (six-decimals, shown-digits) how far a decimal may be from the value it stands for, `form` (any,
/// worked-out) whether a right answer may leave a calculation to the grader, and `problem` the text of the question, whose
/// formulas are then no answers. Any text gets a verdict: nothing raises, hangs or runs code.
///
/// >>> import stapo
/// >>> stapo.grade("The answer is \\boxed{x^2 - 1}.", "(x-1)(x+1)").verdict
/// 'right'
/// >>> stapo.grade("I do not know.", "7").verdict
/// 'no_answer'
/// >>> bool(stapo.grade("it must be 7", "7", fallback="last-number"))
/// True
/// >>> bool(stapo.grade(r"\\boxed{3 + 4}", "7")), bool(stapo.grade(r"\\boxed{3 + 4}", "7", form="worked-out"))
/// (True, False)
#[pyfunction]
#[pyo3(signature = (response, reference, mode="math", *, order="box-first", fallback="nothing", rounding="six-decimals", form="any", problem=None))]
#[allow(clippy::too_many_arguments, reason = "the keyword arguments of a Python function")]
pub fn grade(
    response: &Bound<'_, PyString>,
    reference: &Bound<'_, PyString>,
    mode: &str,
    order: &str,
    fallback: &str,
    rounding: &str,
    form: &str,
    problem: Option<&Bound<'_, PyString>>,
) -> PyResult<Verdict> {
    let rules = rules(mode, order, fallback, rounding, form)?;
    let py = response.py();
    let (response, reference) = (Text::from_python(response), Text::from_python(reference));
    let problem = problem.map(Text::from_python);
    let wanted = Reference { answer: reference.as_str(), problem: problem.as_ref().map(Text::as_str) };
    let graded = without_lock(py, || stapo_verify::grade(response.as_str(), wanted, rules))?;
    Ok(graded.into())
}

/// Whether an answer equals a gold answer, or one of several, in the manner of math-verify: texts in, True or False out,
/// and nothing to parse before.
///
/// `answer` is a response, whose marked answer counts (a box, an `Answer:` line, "the answer is"), or where nothing is marked
/// an answer alone.
///
/// >>> import stapo
/// >>> stapo.verify("1/2", r"so we get \\boxed{0.5}"), stapo.verify("1/2", "0.5"), stapo.verify("1/2", "0.6")
/// (True, True, False)
/// >>> stapo.verify(["x=1", "1"], "1")
/// True
/// >>> stapo.verify("240", "60 + 180", form="worked-out")
/// False
#[pyfunction]
#[pyo3(signature = (gold, answer, *, rounding="six-decimals", form="any", problem=None))]
pub fn verify(
    gold: &Bound<'_, PyAny>,
    answer: &Bound<'_, PyString>,
    rounding: &str,
    form: &str,
    problem: Option<&Bound<'_, PyString>>,
) -> PyResult<bool> {
    let rules = rules("math", "box-first", "nothing", rounding, form)?;
    let golds = match gold.cast::<PyString>() {
        Ok(gold) => vec![Text::from_python(gold)],
        Err(_) => Text::list("gold", gold)?,
    };
    let (text, problem) = (Text::from_python(answer), problem.map(Text::from_python));
    without_lock(answer.py(), || {
        let is_marked = stapo_verify::extract(text.as_str(), Order::BoxFirst, Fallback::Nothing).is_some();
        golds.iter().any(|gold| {
            let wanted = Reference { answer: gold.as_str(), problem: problem.as_ref().map(Text::as_str) };
            let graded = if is_marked {
                stapo_verify::grade(text.as_str(), wanted, rules)
            } else {
                stapo_verify::grade_answer(text.as_str(), wanted, rules)
            };
            graded.verdict == Kind::Right
        })
    })
}

/// Grades many responses, each against its reference, on all cores (or `threads`) without the interpreter's lock;
/// `problems` are the texts of the questions, one for each. The other arguments are those of `grade`.
///
/// >>> import stapo
/// >>> verdicts = stapo.grade_batch([r"\boxed{4}", r"\boxed{5}"], ["2+2", "2+2"])
/// >>> [verdict.verdict for verdict in verdicts], sum(map(bool, verdicts))
/// (['right', 'wrong'], 1)
#[pyfunction]
#[pyo3(signature = (responses, references, mode="math", *, order="box-first", fallback="nothing", rounding="six-decimals", form="any", problems=None, threads=None))]
#[allow(clippy::too_many_arguments, reason = "the keyword arguments of a Python function")]
pub fn grade_batch(
    responses: &Bound<'_, PyAny>,
    references: &Bound<'_, PyAny>,
    mode: &str,
    order: &str,
    fallback: &str,
    rounding: &str,
    form: &str,
    problems: Option<&Bound<'_, PyAny>>,
    threads: Option<i64>,
) -> PyResult<Vec<Verdict>> {
    let rules = rules(mode, order, fallback, rounding, form)?;
    let threads = threads.unwrap_or(0);
    if !(0..=MAX_THREADS as i64).contains(&threads) {
        return Err(refused(format!(
            "threads {threads}: expected None or 0 for one per core, or up to {MAX_THREADS}"
        )));
    }
    let texts = (Text::list("responses", responses)?, Text::list("references", references)?);
    if texts.0.len() != texts.1.len() {
        return Err(refused(format!("{} responses, {} references", texts.0.len(), texts.1.len())));
    }
    let problems = problems.map(|problems| Text::list("problems", problems)).transpose()?;
    if let Some(problems) = problems.as_ref().filter(|problems| problems.len() != texts.0.len()) {
        return Err(refused(format!("{} responses, {} problems", texts.0.len(), problems.len())));
    }
    let problems: Box<dyn Iterator<Item = Option<Text>>> = match problems {
        Some(problems) => Box::new(problems.into_iter().map(Some)),
        None => Box::new(std::iter::repeat_with(|| None)),
    };
    let rows = texts.0.into_iter().zip(texts.1).zip(problems);
    let rows: Vec<Row> =
        rows.map(|((response, answer), problem)| Row { response, answer, problem }).collect();
    let n_cores = thread::available_parallelism().map_or(1, usize::from);
    let n_threads = if threads == 0 { n_cores } else { threads as usize };
    let graded = without_lock(responses.py(), || grade_all(&rows, rules, n_threads))??;
    Ok(graded)
}

/// A response, the right answer, and the question if it is at hand.
struct Row {
    response: Text,
    answer: Text,
    problem: Option<Text>,
}

impl Row {
    fn grade(&self, rules: Rules) -> Graded {
        let problem = self.problem.as_ref().map(Text::as_str);
        stapo_verify::grade(
            self.response.as_str(),
            Reference { answer: self.answer.as_str(), problem },
            rules,
        )
    }
}

/// Grades on up to `n_threads` threads of this call's own: threads that outlive a call would be missing in a forked
/// process. The calling thread looks for signals meanwhile.
fn grade_all(rows: &[Row], rules: Rules, n_threads: usize) -> PyResult<Vec<Verdict>> {
    let n_threads = n_threads.min(rows.len().div_ceil(CHUNK));
    let next = AtomicUsize::new(0);
    let is_over = AtomicBool::new(false);
    let mut verdicts: Vec<Option<Verdict>> = vec![None; rows.len()];
    thread::scope(|scope| {
        let (done, chunks) = channel();
        for started in 0..n_threads {
            let (done, next, is_over) = (done.clone(), &next, &is_over);
            let work = move || {
                while !is_over.load(Ordering::Relaxed) {
                    let start = next.fetch_add(CHUNK, Ordering::Relaxed);
                    let Some(own) = rows.get(start..(start + CHUNK).min(rows.len())) else { break };
                    if own.is_empty() {
                        break;
                    }
                    let graded = own.iter().map(|row| row.grade(rules).into());
                    let graded: Vec<Verdict> = graded.collect();
                    if done.send((start, graded)).is_err() {
                        break;
                    }
                }
            };
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
                if started == 0 {
                    return Err(refused(format!("starting threads: {error}")));
                }
                // The threads that could be started do the work.
                break;
            }
        }
        drop(done);
        let mut last_look = std::time::Instant::now();
        loop {
            match chunks.recv_timeout(LOOK) {
                Ok((start, graded)) => {
                    for (place, verdict) in verdicts[start..].iter_mut().zip(graded) {
                        *place = Some(verdict);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if last_look.elapsed() >= LOOK {
                last_look = std::time::Instant::now();
                if let Err(signal) = check_signals() {
                    is_over.store(true, Ordering::Relaxed);
                    return Err(signal);
                }
            }
        }
    })?;
    Ok(verdicts.into_iter().flatten().collect())
}

fn rules(mode: &str, order: &str, fallback: &str, rounding: &str, form: &str) -> PyResult<Rules> {
    Ok(Rules {
        mode: mode.parse::<Mode>().map_err(refused)?,
        order: named("order", order)?,
        fallback: named("fallback", fallback)?,
        rounding: named("rounding", rounding)?,
        form: named("form", form)?,
    })
}

/// The value of a closed set that has that name.
fn named<'a, T: Deserialize<'a>>(key: &str, name: &'a str) -> PyResult<T> {
    let text: StrDeserializer<'a, NameError> = name.into_deserializer();
    T::deserialize(text).map_err(|error| refused(format!("{key}: {error}")))
}

/// A string of Python's, shared where it is UTF-8. Halves of surrogate pairs, which some tokenizers leave, are
/// replaced.
enum Text {
    Shared(PyBackedStr),
    Repaired(String),
}

impl Text {
    fn from_python(text: &Bound<'_, PyString>) -> Self {
        match PyBackedStr::try_from(text.clone()) {
            Ok(shared) => Text::Shared(shared),
            Err(_) => Text::Repaired(text.to_string_lossy().into_owned()),
        }
    }

    fn list(name: &str, texts: &Bound<'_, PyAny>) -> PyResult<Vec<Self>> {
        if texts.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(format!("{name}: a string, expected a list of strings")));
        }
        let text = |(idx, item): (usize, PyResult<Bound<'_, PyAny>>)| {
            let item = item?;
            let text = item.cast::<PyString>().map_err(|_| {
                let kind = item.get_type();
                PyTypeError::new_err(format!("{name}[{idx}]: {kind}, expected a string"))
            })?;
            Ok(Text::from_python(text))
        };
        let items = texts.try_iter().map_err(|_| {
            PyTypeError::new_err(format!("{name}: {}, expected a list of strings", texts.get_type()))
        })?;
        items.enumerate().map(text).collect()
    }

    fn as_str(&self) -> &str {
        match self {
            Text::Shared(text) => text,
            Text::Repaired(text) => text,
        }
    }
}
