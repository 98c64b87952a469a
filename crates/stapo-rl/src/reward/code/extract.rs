//! The program in a response.

use crate::reward::spec::CodeStyle;

/// Tags of blocks that hold Python.
const TAGS: [&str; 4] = ["", "python", "py", "python3"];

/// The program in a response; `None` if there is none. `prompt` begins the program of a response that continues it.
pub fn extract(response: &str, style: CodeStyle, prompt: &str) -> Option<String> {
    match style {
        CodeStyle::Block => last_block(response),
        CodeStyle::Complete => Some(format!("{prompt}{}", before_fence(response))),
        CodeStyle::Whole => {
            Some(before_fence(response).to_string()).filter(|program| !program.trim().is_empty())
        }
    }
}

/// The response up to a line of three backticks, which no line of Python begins with: it closes a block that the prompt opened.
fn before_fence(response: &str) -> &str {
    response.split_once("\n```").map_or(response, |(before, _)| before)
}

/// The last fenced block that holds Python by its tag, or else the last one. A block that is not closed reaches to the end
/// of the response.
fn last_block(response: &str) -> Option<String> {
    let mut blocks: Vec<(String, String)> = Vec::new();
    let mut open: Option<(&str, String, String)> = None;
    for line in response.split_inclusive('\n') {
        let text = line.trim();
        open = match open.take() {
            None => text.starts_with("```").then(|| {
                let tag = text.trim_start_matches('`');
                let fence = &text[..text.len() - tag.len()];
                (fence, tag.trim().to_lowercase(), String::new())
            }),
            Some((fence, tag, program)) if text == fence => {
                blocks.push((tag, program));
                None
            }
            Some((fence, tag, program)) => Some((fence, tag, program + line)),
        };
    }
    blocks.extend(open.map(|(_, tag, program)| (tag, program)));
    blocks.retain(|(_, program)| !program.trim().is_empty());
    let python = blocks.iter().rposition(|(tag, _)| TAGS.contains(&tag.as_str()));
    let chosen = python.or_else(|| blocks.len().checked_sub(1))?;
    Some(blocks.swap_remove(chosen).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_last_block_of_python() {
        let block = |response: &str| extract(response, CodeStyle::Block, "");
        let cases = [
            ("```python\na = 1\n```", Some("a = 1\n")),
            ("one\n```\na\n```\ntwo\n```py\nb\n```\nend", Some("b\n")),
            ("```python\na\n```\nOutput:\n```text\n3\n```", Some("a\n")),
            ("```c\nint main;\n```", Some("int main;\n")),
            ("```python\nnot closed", Some("not closed")),
            ("````md\n```\nb\n```\n````", Some("```\nb\n```\n")),
            ("  ```python\n  a\n  ```", Some("  a\n")),
            ("no block", None),
            ("```python\n\n```", None),
        ];
        for (response, program) in cases {
            assert_eq!(block(response).as_deref(), program, "{response:?}");
        }
        let completed = extract("    return 1\n", CodeStyle::Complete, "def f():\n");
        assert_eq!(completed.as_deref(), Some("def f():\n    return 1\n"));
        assert_eq!(extract("print(1)\n```\nDone.", CodeStyle::Whole, "x").as_deref(), Some("print(1)"));
        assert_eq!(extract("print(1)", CodeStyle::Whole, "x").as_deref(), Some("print(1)"));
        assert_eq!(extract(" \n", CodeStyle::Whole, "x"), None);
    }
}
