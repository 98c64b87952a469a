use super::category::{TokenCategory, TokenCategory::*, category_in_response, words};
use super::{ProgramEnd, ProgramRun};

#[test]
fn a_program_is_split_into_its_lexemes() {
    let found = words("def f(x1):  # add\n    return x1 + .5e3 != r'a\\'#' or None");
    let expected = [
        ("def", Keyword),
        (" ", Whitespace),
        ("f", Identifier),
        ("(", Operator),
        ("x1", Identifier),
        (")", Operator),
        (":", Operator),
        ("  ", Whitespace),
        ("# add", Comment),
        ("\n    ", Whitespace),
        ("return", Keyword),
        (" ", Whitespace),
        ("x1", Identifier),
        (" ", Whitespace),
        ("+", Operator),
        (" ", Whitespace),
        (".5e3", Literal),
        (" ", Whitespace),
        ("!", Operator),
        ("=", Operator),
        (" ", Whitespace),
        ("r'a\\'#'", Literal),
        (" ", Whitespace),
        ("or", Keyword),
        (" ", Whitespace),
        ("None", Keyword),
    ];
    assert_eq!(found, expected);
}

#[test]
fn strings_end_where_python_ends_them() {
    let first = |source: &'static str| words(source)[0];
    let cases = [
        ("'''a\n'b''' c", "'''a\n'b'''"),
        ("\"not closed\nx", "\"not closed"),
        ("\"\"\"not closed\nx", "\"\"\"not closed\nx"),
        ("Rb'x'", "Rb'x'"),
        ("'é\\", "'é\\"),
        ("'' ''", "''"),
    ];
    for (source, literal) in cases {
        assert_eq!(first(source), (literal, Literal), "{source:?}");
    }
    assert_eq!(first("abc'x'"), ("abc", Identifier), "a prefix has at most two letters");
    assert_eq!(first("ab'x'"), ("ab", Identifier), "and only some letters");
}

#[test]
fn a_token_has_the_category_of_its_first_character_that_is_not_blank() {
    let source = "def f():\n    return 'a b'\n";
    let response = format!("Here:\n```python\n{source}```\n");
    let category = |part: &str| {
        let from = response.find(part).unwrap();
        category_in_response(&response, source, from, from + part.len())
    };
    assert_eq!(category("Here"), Prose);
    assert_eq!(category("def"), Keyword);
    assert_eq!(category(" f"), Identifier);
    assert_eq!(category("():\n"), Operator);
    assert_eq!(category("\n    "), Whitespace);
    assert_eq!(category("b'"), Literal);
    assert_eq!(category("```\n"), Prose, "the last fence");
    let continued = "def g(x):\n    return x\n";
    assert_eq!(category_in_response("    return x\n", continued, 4, 10), Keyword, "of a continued prompt");
    assert_eq!(category_in_response("no program", "", 0, 2), Prose);
}

#[test]
fn long_texts_are_cut_at_a_character_with_a_marker() {
    let run = |text: &str| ProgramRun {
        source: "x".into(),
        end: ProgramEnd::FailedTest,
        failing_test: Some(text.into()),
        printed: text.into(),
        cpu_seconds: 0.5,
    };
    assert_eq!(run("short").bounded(), run("short"));
    let long = "é".repeat(ProgramRun::MAX_TEXT_BYTES);
    let cut = run(&format!("a{long}")).bounded();
    let kept = format!("a{}", "é".repeat(ProgramRun::MAX_TEXT_BYTES / 2 - 1));
    assert_eq!(cut.printed, format!("{kept} ... (2002 more bytes)"));
    assert_eq!(cut.failing_test.as_deref(), Some(cut.printed.as_str()));
}

#[test]
fn ends_and_categories_have_names_of_their_own() {
    let ends = [
        ProgramEnd::Passed,
        ProgramEnd::FailedTest,
        ProgramEnd::Crashed,
        ProgramEnd::TimeOut,
        ProgramEnd::Memory,
        ProgramEnd::Output,
        ProgramEnd::Processes,
        ProgramEnd::FileSize,
        ProgramEnd::NoProgram,
    ];
    let labels = ends.map(ProgramEnd::label);
    assert_eq!((labels[0], labels[3], labels[8]), ("passed", "timed out", "no program"));
    assert!(labels.iter().all(|label| labels.iter().filter(|other| *other == label).count() == 1));
    for category in TokenCategory::ALL {
        assert_eq!(serde_json::to_value(category).unwrap(), category.name());
    }
}
