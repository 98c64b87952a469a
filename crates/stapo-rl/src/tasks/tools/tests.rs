use super::*;
use stapo_core::random::Key;

fn named(arguments: &Value) -> Arguments {
    Arguments::Named(arguments.as_object().unwrap().clone())
}

fn parsed(format: CallFormat, text: &str) -> Vec<(String, Arguments)> {
    let calls = format.parse(text).calls;
    calls.into_iter().map(|call| call.map(|call| (call.tool, call.arguments)).unwrap()).collect()
}

/// The words of the first problem of a turn.
fn problem(format: CallFormat, text: &str) -> String {
    format
        .parse(text)
        .calls
        .into_iter()
        .find_map(Result::err)
        .unwrap_or_else(|| panic!("{text:?}: no problem"))
        .text
}

#[test]
fn hermes_calls_are_read_in_order() {
    let text = "First.\n<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"1+1\"}}\n</tool_call>\n<tool_call>{\"name\": \"search\", \"arguments\": \"{\\\"query\\\": \\\"x\\\"}\"}</tool_call>";
    let expected = [
        ("calculator".to_string(), named(&json!({"expression": "1+1"}))),
        ("search".to_string(), named(&json!({"query": "x"}))),
    ];
    assert_eq!(parsed(CallFormat::Hermes, text), expected);
    let thought = "<think><tool_call>{\"name\": \"a\"}</tool_call></think>the answer is 4";
    assert_eq!(CallFormat::Hermes.parse(thought), ParsedTurn::default());
}

#[test]
fn what_is_wrong_with_a_call_is_said() {
    let hermes = |inside: &str| problem(CallFormat::Hermes, &format!("<tool_call>{inside}</tool_call>"));
    assert!(hermes("{\"name\": \"x\", }").contains("no JSON"));
    assert!(hermes("[1, 2]").contains("JSON object with \"name\""));
    assert!(hermes("{\"name\": \"x\", \"arguments\": [1]}").contains("a list"));
    assert!(hermes(&"[".repeat(100_000)).contains("no JSON"));
    assert!(problem(CallFormat::Hermes, "<tool_call>{\"name\": \"x\"}").contains("without </tool_call>"));
    // A call after one that is not closed is read.
    let turn = CallFormat::Hermes.parse("<tool_call>{<tool_call>{\"name\": \"x\"}</tool_call>");
    assert_eq!((turn.calls.len(), turn.calls[0].is_err(), turn.calls[1].is_ok()), (2, true, true));
    assert!(problem(CallFormat::Llama3, "{\"name\": \"x\", ").contains("no JSON"));
    assert!(problem(CallFormat::Plain, "CALL calculator 3").contains("expected CALL name(arguments)"));
    assert!(problem(CallFormat::PythonBlock, "```python\nprint(1)").contains("not closed"));
    let many = "CALL calculator(1)\n".repeat(calls::MAX_CALLS + 5);
    let turn = CallFormat::Plain.parse(&many);
    assert_eq!(turn.calls.len(), calls::MAX_CALLS + 1);
    assert!(turn.calls.last().unwrap().is_err());
}

#[test]
fn llama_writes_json_tagged_calls_and_python() {
    let json = "{\"name\": \"search\", \"parameters\": {\"query\": \"x\"}}; {\"name\": \"calculator\", \"parameters\": {\"expression\": \"2\"}}<|eom_id|>";
    let expected = [
        ("search".to_string(), named(&json!({"query": "x"}))),
        ("calculator".to_string(), named(&json!({"expression": "2"}))),
    ];
    assert_eq!(parsed(CallFormat::Llama3, json), expected);
    assert_eq!(parsed(CallFormat::Llama3, &format!("<|python_tag|>{json}")), expected);
    let built_in = "<|python_tag|>search.call(query=\"a, b\", n=3)";
    let expected = [("search".to_string(), named(&json!({"query": "a, b", "n": 3})))];
    assert_eq!(parsed(CallFormat::Llama3, built_in), expected);
    let code = "<|python_tag|>print({'name': 1})<|eom_id|>";
    let expected = [("python".to_string(), Arguments::Text("print({'name': 1})".into()))];
    assert_eq!(parsed(CallFormat::Llama3, code), expected);
    for answer in ["The answer is {1, 2}.", "{1, 2}", ""] {
        assert_eq!(CallFormat::Llama3.parse(answer), ParsedTurn::default(), "{answer}");
    }
}

#[test]
fn plain_calls_and_fenced_blocks() {
    let text = "I need this.\nCALL calculator((1+2)*3)\n  CALL search(query='a', n=2)\nCALL now()";
    let expected = [
        ("calculator".to_string(), Arguments::Text("(1+2)*3".into())),
        ("search".to_string(), named(&json!({"query": "a", "n": 2}))),
        ("now".to_string(), Arguments::Text(String::new())),
    ];
    assert_eq!(parsed(CallFormat::Plain, text), expected);
    let blocks = "Text\n```python\nx = 1\nprint(x)\n```\nmore\n```json\n{}\n```\n```py\n2\n```";
    let expected = [
        ("python".to_string(), Arguments::Text("x = 1\nprint(x)".into())),
        ("python".to_string(), Arguments::Text("2".into())),
    ];
    assert_eq!(parsed(CallFormat::PythonBlock, blocks), expected);
}

#[test]
fn finish_ends_the_turn_with_its_answer() {
    let check = |format: CallFormat, text: &str| {
        let turn = format.parse(text);
        assert_eq!(turn.answer.as_deref(), Some("42"), "{text}");
        assert_eq!(turn.calls.len(), 1, "{text}");
    };
    check(CallFormat::Plain, "CALL calculator(6*7)\nCALL finish(42)\nCALL calculator(1)");
    check(CallFormat::Plain, "CALL calculator(6*7)\nCALL finish(answer=42)");
    let call = |name: &str| {
        format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{\"answer\": 42}}}}</tool_call>")
    };
    check(CallFormat::Hermes, &(call("x") + &call("finish") + &call("y")));
}

const PIECES: [&str; 24] = [
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    "\"name\"",
    ":",
    "\"finish\"",
    "arguments",
    "\\",
    "\"",
    "'",
    "CALL ",
    "(",
    ")",
    "=",
    ",",
    "```",
    "```python\n",
    "\n",
    "<|python_tag|>",
    ".call(",
    "é😀",
    "1e999",
    "</think>",
];

#[test]
fn any_text_is_read() {
    for case in 0..5000 {
        let key = Key::new(case);
        let n_pieces = key.with(0).below(24);
        let piece = |idx: u64| PIECES[key.with(1).with(idx).below(PIECES.len() as u64) as usize];
        let text: String = (0..n_pieces).map(piece).collect();
        for format in [CallFormat::Hermes, CallFormat::Llama3, CallFormat::PythonBlock, CallFormat::Plain] {
            let turn = format.parse(&text);
            assert!(turn.calls.len() <= calls::MAX_CALLS + 1, "{text}");
        }
    }
}

fn open(specs: &[ToolSpec]) -> ToolSet {
    ToolSet::from_spec(specs, Programs::Allowed).unwrap()
}

fn text_call(tool: &str, text: &str) -> Call {
    Call { tool: tool.into(), arguments: Arguments::Text(text.into()) }
}

#[test]
fn the_calculator_is_exact_and_refuses_what_is_not_arithmetic() {
    let tools = open(&[ToolSpec::Calculator]);
    let answer = |text: &str| tools.call(&text_call("calculator", text)).unwrap();
    for (expression, value) in [
        ("123456789*987654321", "121932631112635269"),
        ("1/3+1/6", "1/2"),
        ("0.1+0.2", "3/10"),
        ("7-7", "0"),
        ("2**64", "18446744073709551616"),
        ("sqrt(8)/sqrt(2)", "2"),
        ("2*pi", "2*pi"),
    ] {
        assert_eq!(answer(expression).text, value);
        assert!(!answer(expression).failed);
    }
    for (expression, word) in [
        ("1/0", "zero"),
        ("12*(3", "bracket"),
        ("x+1", "not arithmetic"),
        ("rm -rf", "error"),
        ("", "error"),
        ("10^500", "digits"),
    ] {
        let observation = answer(expression);
        assert!(observation.failed && observation.text.contains(word), "{expression}: {observation:?}");
    }
}

#[test]
fn calls_that_no_tool_can_take_become_observations() {
    let tools = open(&[ToolSpec::Calculator, ToolSpec::Finish]);
    let check = |call: Call, words: &[&str]| {
        let observation = tools.call(&call).unwrap();
        assert!(observation.failed && !observation.timed_out);
        assert!(words.iter().all(|word| observation.text.contains(word)), "{observation:?}");
    };
    check(text_call("weather", ""), &["error: there is no tool \"weather\"", "calculator, finish"]);
    let unnamed = Call { tool: "calculator".into(), arguments: named(&json!({"x": 1})) };
    check(unnamed, &["\"expression\" is missing", "calculator(expression)"]);
}

#[test]
fn schemas_have_the_form_that_templates_read() {
    let tools = open(&[ToolSpec::Calculator, ToolSpec::Finish]);
    let schemas = tools.schemas();
    assert_eq!(schemas[0]["type"], "function");
    assert_eq!(schemas[0]["function"]["name"], "calculator");
    assert_eq!(schemas[0]["function"]["parameters"]["required"], json!(["expression"]));
    assert_eq!(schemas[1]["function"]["parameters"]["properties"]["answer"]["type"], "string");
    assert!(tools.describe().starts_with("calculator(expression): Computes"));
    let Err(error) = ToolSet::from_spec(&[ToolSpec::Finish, ToolSpec::Finish], Programs::Never) else {
        panic!("two tools of one name")
    };
    assert!(error.to_string().contains("two tools are called \"finish\""));
}

#[test]
fn search_ranks_by_words_and_breaks_ties_by_the_order_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("texts.txt");
    std::fs::write(&path, "the cat sat\n\nthe dog sat\non the mat\n\nthe cat ran\n\n\nzebra\n").unwrap();
    let tools = open(&[ToolSpec::Search(SearchSpec { path: path.clone(), results: 2 })]);
    let found = |query: &str| tools.call(&text_call("search", query)).unwrap().text;
    assert_eq!(found("Cat!"), "[1] the cat sat\n\n[2] the cat ran");
    assert_eq!(found("ran cat"), "[1] the cat ran\n\n[2] the cat sat");
    assert_eq!(found("mat dog"), "[1] the dog sat\non the mat");
    assert_eq!(found("unicorn"), "no passage matches");
    // Of passages with the word as often, the shorter one is more about it.
    std::fs::write(&path, "a cat and many other words\n\nthe cat\n\nthe dog\n").unwrap();
    let tools = open(&[ToolSpec::Search(SearchSpec { path: path.clone(), results: 2 })]);
    let shorter_first = "[1] the cat\n\n[2] a cat and many other words";
    assert_eq!(tools.call(&text_call("search", "cat")).unwrap().text, shorter_first);
    std::fs::write(&path, "\n\n").unwrap();
    let Err(error) =
        ToolSet::from_spec(&[ToolSpec::Search(SearchSpec { path, results: 2 })], Programs::Never)
    else {
        panic!("an empty file was opened")
    };
    assert!(error.to_string().contains("holds no text"), "{error}");
}

#[test]
fn two_tools_of_one_name_are_refused() {
    let open = |tools: &[ToolSpec]| ToolSet::from_spec(tools, Programs::Never).map(|_| ());
    assert!(open(&[ToolSpec::Calculator, ToolSpec::Finish]).is_ok());
    let said = open(&[ToolSpec::Calculator, ToolSpec::Finish, ToolSpec::Calculator]).unwrap_err().to_string();
    assert!(said.contains("two tools are called \"calculator\""), "{said}");
}
