//! How a model is asked for a program.

use crate::reward::spec::CodeStyle;
use serde_json::{Map, Value};

/// The kind of tests that a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestKind {
    /// `test_list`: statements, as in MBPP.
    Asserts,
    /// `test` with `entry_point`: the program continues `prompt`, as in HumanEval.
    Check,
    /// `tests` with `entry_point`: calls of a function.
    Calls,
    /// `tests`: pairs of standard input and output.
    Streams,
}

/// A prompt, and how the response to it holds a program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asking {
    /// A Jinja template over the row's fields.
    pub template: &'static str,
    pub style: CodeStyle,
    /// Texts that begin what no longer belongs to a continued program.
    pub stops: &'static [&'static str],
}

/// What follows the body of a function (Chen et al. 2021, section 2), and the fence of a block.
const AFTER_BODY: [&str; 6] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"];
/// What follows a program of functions (Fried et al. 2022), and the fence of a block.
const AFTER_FUNCTIONS: [&str; 5] = ["\nassert", "\n\"\"\"", "\nif", "\nprint", "\n```"];
const AFTER_SCRIPT: [&str; 2] = ["\n\"\"\"", "\n```"];

impl TestKind {
    /// The kind of a row; `None` for a row without tests.
    pub fn of_row(row: &Map<String, Value>) -> Option<Self> {
        let is_text = |key: &str| row.get(key).is_some_and(Value::is_string);
        if row.get("test_list").is_some_and(Value::is_array) {
            return Some(Self::Asserts);
        }
        if is_text("test") && is_text("entry_point") {
            return Some(Self::Check);
        }
        let first = row.get("tests")?.as_array()?.first()?;
        if first.get("input").is_some_and(Value::is_string) && first.get("output").is_some() {
            return Some(Self::Streams);
        }
        is_text("entry_point").then_some(Self::Calls)
    }

    /// Asks for a fenced block in words. Of several tests the prompt shows one: a policy that sees all of them learns them by heart.
    pub fn instruction(self) -> Asking {
        let template = match self {
            Self::Asserts => {
                "{{ problem }}\n\nThe program must pass tests such as this one:\n```python\n{{ test_list[0] }}\n```\nAnswer with the whole program in one fenced block of Python."
            }
            Self::Check => {
                "Complete this program:\n```python\n{{ prompt | trim }}\n```\nAnswer with the whole program, its imports included, in one fenced block of Python."
            }
            Self::Calls => {
                "{{ problem }}\n\nThe function is named {{ entry_point }}. Answer with the whole program in one fenced block of Python."
            }
            Self::Streams => {
                "{{ problem }}\n\nThe program reads standard input and writes standard output. Answer with the whole program in one fenced block of Python."
            }
        };
        Asking { template, style: CodeStyle::Block, stops: &[] }
    }

    /// Begins a program that a base model continues.
    pub fn beginning(self) -> Asking {
        let (template, stops): (_, &[&str]) = match self {
            Self::Asserts => ("\"\"\"\n{{ problem }}\n{{ test_list[0] }}\n\"\"\"\n", &AFTER_FUNCTIONS),
            Self::Check => {
                return Asking { template: "{{ prompt }}", style: CodeStyle::Complete, stops: &AFTER_BODY };
            }
            Self::Calls => (
                "\"\"\"\n{{ problem }}\nThe function is named {{ entry_point }}.\n\"\"\"\n",
                &AFTER_FUNCTIONS,
            ),
            Self::Streams => (
                "\"\"\"\n{{ problem }}\nThe program reads standard input and writes standard output.\n\"\"\"\n",
                &AFTER_SCRIPT,
            ),
        };
        Asking { template, style: CodeStyle::Whole, stops }
    }
}

impl Asking {
    /// The response up to the first of the stops.
    pub fn cut<'a>(&self, response: &'a str) -> &'a str {
        let end = self.stops.iter().filter_map(|stop| response.find(stop)).min();
        &response[..end.unwrap_or(response.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_told_apart_by_their_tests() {
        let cases = [
            (json!({"test_list": ["assert f()"], "prompt": "p"}), Some(TestKind::Asserts)),
            (json!({"test": "def check(c): ..", "entry_point": "f"}), Some(TestKind::Check)),
            (json!({"tests": [{"args": [1], "expected": 2}], "entry_point": "f"}), Some(TestKind::Calls)),
            (json!({"tests": [{"input": [1], "expected": "2"}], "entry_point": "f"}), Some(TestKind::Calls)),
            (json!({"tests": [{"input": "1", "output": "2"}]}), Some(TestKind::Streams)),
            (json!({"tests": [{"input": "1", "output": "2"}, {"args": [1]}]}), Some(TestKind::Streams)),
            (json!({"problem": "p", "answer": "1", "test": "first"}), None),
            (json!({"tests": []}), None),
        ];
        for (row, kind) in cases {
            assert_eq!(TestKind::of_row(row.as_object().unwrap()), kind, "{row}");
        }
    }

    #[test]
    fn a_continued_program_ends_where_the_next_thing_begins() {
        let body = TestKind::Check.beginning();
        assert_eq!(body.cut("    return x\n\n# next\nprint(f(1))"), "    return x\n");
        assert_eq!(body.cut("    # inside\n    return x"), "    # inside\n    return x");
        let functions = TestKind::Asserts.beginning();
        assert_eq!(functions.cut("def g(): ..\ndef f(): ..\nassert f()"), "def g(): ..\ndef f(): ..");
        let block = TestKind::Asserts.instruction();
        assert_eq!(block.cut("a\n```python\nx\n```"), "a\n```python\nx\n```", "a block has its own end");
    }
}
