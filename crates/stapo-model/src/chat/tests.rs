use super::*;
use serde_json::{Value as Json, json};

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

fn template(source: &str) -> Result<ChatTemplate> {
    ChatTemplate::new("model", source, SpecialTokens::new())
}

fn rendered(source: &str) -> Result<String> {
    template(source)?.prompt(&[message("user", "hi")], &Map::new())
}

fn check_refused(source: &str, words: &[&str]) {
    let message = rendered(source).expect_err("rendered").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn conversations_render_as_by_transformers() {
    let golden: Json = serde_json::from_str(include_str!("../../tests/data/formats/chat.json")).unwrap();
    let special_tokens = serde_json::from_value(golden["special_tokens"].clone()).unwrap();
    let template = ChatTemplate::new("model", golden["template"].as_str().unwrap(), special_tokens).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for case in cases {
        let text = |value: &Json| value.as_str().unwrap().to_owned();
        let turn = |m: &Json| Message { role: text(&m["role"]), content: text(&m["content"]) };
        let messages: Vec<_> = case["messages"].as_array().unwrap().iter().map(turn).collect();
        let variables = case["variables"].as_object().unwrap();
        let ours = if case["prompt"] == true {
            template.prompt(&messages, variables)
        } else {
            template.transcript(&messages, variables)
        };
        match case.get("refused").and_then(Json::as_str) {
            Some(refusal) => assert!(ours.unwrap_err().to_string().contains(refusal), "{case}"),
            None => assert_eq!(ours.unwrap(), text(&case["text"]), "{case}"),
        }
    }
}

#[test]
fn a_template_may_refuse_a_conversation_in_its_own_words() {
    check_refused("{{ raise_exception('roles must alternate') }}", &["refuses", "roles must alternate"]);
}

/// The templates are in the style of the published ones of ten families; `transformers` had its clock stopped.
#[test]
fn templates_of_every_style_render_as_by_transformers() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat");
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let golden: Json = serde_json::from_str(&text("rendered.json")).unwrap();
    let special_tokens: SpecialTokens = serde_json::from_value(golden["special_tokens"].clone()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 150);
    let mut n_without_date = 0;
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let template =
            ChatTemplate::new(name, &text(&format!("{name}.jinja")), special_tokens.clone()).unwrap();
        let turn = |turn: &Json| message(turn["role"].as_str().unwrap(), turn["content"].as_str().unwrap());
        let messages: Vec<_> = case["messages"].as_array().unwrap().iter().map(turn).collect();
        let mut variables = case["variables"].as_object().unwrap().clone();
        let is_prompt = case["prompt"] == true;
        let render = |variables: &Map<String, Json>| {
            let text = template.render(&messages, is_prompt, variables);
            text.map_err(|error| error.to_string())
        };
        if let Err(said) = render(&variables) {
            n_without_date += usize::from(said.contains("strftime_now"));
        }
        variables.insert("today".into(), golden["today"].clone());
        match case.get("refused").and_then(Json::as_str) {
            Some(refusal) => assert!(render(&variables).unwrap_err().contains(refusal), "{case}"),
            None => assert_eq!(render(&variables).unwrap(), case["text"].as_str().unwrap(), "{case}"),
        }
    }
    // Granite asks where there is no system message, SmolLM3 where the message does not stand alone.
    assert_eq!(n_without_date, 15 + 3 + 15 + 12);
}

#[test]
fn the_clock_is_not_there_and_a_given_date_is() {
    let guarded = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}1999{% endif %}";
    assert_eq!(rendered(guarded).unwrap(), "1999");
    let hint = "chat_arguments = { today = \"2026-11-18\" }";
    check_refused("a\n{{ strftime_now('%Y') }}", &["strftime_now is unknown (line 2)", "hint: ", hint]);
    let with = |source: &str, today: Json| {
        let variables = json!({"today": today});
        let text = template(source).unwrap().prompt(&[], variables.as_object().unwrap());
        text.map_err(|error| error.to_string())
    };
    assert_eq!(with(guarded, json!("2031-02-03")).unwrap(), "2031");
    assert_eq!(with(guarded, json!(null)).unwrap(), "1999");
    assert_eq!(
        with("{{ strftime_now('%d %B %Y, %A') }}", json!("2026-11-08")).unwrap(),
        "08 November 2026, Sunday"
    );
    assert_eq!(with("{{ today }}", json!("some day")).unwrap(), "some day");
    for (pattern, today, words) in [
        ("'%Y'", json!("18 November 2026"), ["today is '18 November 2026', expected a date", hint]),
        ("'%Y'", json!(20261118), ["today is 20261118, expected a date", hint]),
        ("'%Q'", json!("2026-11-18"), ["\"%Q\" is no letter", "hint: known are %Y"]),
        ("7", json!("2026-11-18"), ["takes a text, not number", "hint: "]),
        ("'%Y', 2", json!("2026-11-18"), ["takes one pattern", "hint: "]),
    ] {
        let said = with(&format!("{{{{ strftime_now({pattern}) }}}}"), today).unwrap_err();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
}

/// One engine renders many conversations.
#[test]
fn the_date_of_one_rendering_is_not_that_of_the_next() {
    let source = "{% if strftime_now is defined %}{{ strftime_now('%y') }}{% endif %}.";
    let template = Template::new(source.into(), Dialect::Chat).unwrap();
    let limits = Limits { steps: 1000, work_bytes: 1 << 20, output_bytes: 100 };
    let given = [Some("2026-11-18"), None, Some("2031-02-03")];
    let renderings = given.map(|today| (Value::from(Serde(json!({"today": today}))), limits));
    assert_eq!(template.render_all(&renderings).unwrap(), ["26.", ".", "31."]);
}

#[test]
fn endless_templates_run_out_of_steps() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    check_refused(nested, &["fuel", "hint: "]);
    check_refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", &["recursion"]);
    check_refused("{{ 'x' * 1000000000000 }}", &["constant", "4096"]);
    check_refused("{{ range(1000000000) }}", &["range"]);
}

#[test]
fn templates_reach_no_files_and_no_internals() {
    check_refused("{% include '/etc/passwd' %}", &["include"]);
    check_refused("{{ open('/etc/passwd') }}", &["open"]);
    check_refused("{{ ''.__class__.__mro__ }}", &["undefined"]);
}

#[test]
fn broken_templates_are_refused_with_their_line() {
    check_refused("a\n{% if %}", &["syntax error", "line 2"]);
    check_refused(&"x".repeat(crate::template::MAX_TEMPLATE_BYTES + 1), &["model: ", "262145 bytes"]);
    check_refused(&format!("{{{{ {} }}}}", "(".repeat(10_000)), &["recursion"]);
}

#[test]
fn special_tokens_and_variables_have_names() {
    let tokens = [("bos_token".to_owned(), "<s>".to_owned())].into();
    let template = ChatTemplate::new("model", "{{ bos_token }}{{ x }}{{ eos_token }}", tokens).unwrap();
    assert_eq!(template.prompt(&[], json!({"x": 1}).as_object().unwrap()).unwrap(), "<s>1");
}

/// A long conversation may take more steps and work than a short one.
#[test]
fn the_bounds_of_a_rendering_grow_with_its_conversation() {
    let template = template("x").unwrap();
    let limits = |messages: &[Message]| {
        let (_, limits) = template.rendering(messages, true, &Map::new());
        (limits.steps, limits.work_bytes, limits.output_bytes)
    };
    let one = [message("user", "12345678")];
    assert_eq!(limits(&one), (3_000_000, (64 << 20) + 256 * 8, 64 << 20));
    let many = vec![message("user", "12"); 100];
    assert_eq!(limits(&many), (6_000_000, (64 << 20) + 256 * 200, 64 << 20));
    let observed = [json!({"role": "tool", "content": "123"}), json!({"role": "user", "content": null})];
    let (_, limits) = template.rendering(&observed, true, &Map::new());
    assert_eq!(limits.work_bytes, (64 << 20) + 256 * 3);
}

/// Hugging Face marks the assistant's tokens by a tag that renders nothing.
#[test]
fn marks_of_generation_keep_their_control_of_white_space() {
    for (source, expected) in [
        ("{% generation %}a{% endgeneration %}", "{% if true %}a{% endif %}"),
        ("{%- generation -%} a {%- endgeneration -%}", "{%- if true -%} a {%- endif -%}"),
        ("{%+ generation %}", "{%+ if true %}"),
        ("{% generations %}{% if generation %}", "{% generations %}{% if generation %}"),
        ("{{ generation }} generation {% generation", "{{ generation }} generation {% generation"),
    ] {
        assert_eq!(without_generation_marks(source), expected);
    }
    let source = "a {%- generation -%} {{ messages[0].content }} {%- endgeneration -%} b";
    assert_eq!(rendered(source).unwrap(), "ahib");
}

#[test]
fn a_template_knows_whether_an_answer_is_to_begin_and_has_no_tools_or_documents() {
    let source =
        "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} {{ messages | length }}";
    let template = template(source).unwrap();
    let one = [message("user", "hi")];
    assert_eq!(template.prompt(&one, &Map::new()).unwrap(), "True True True 1");
    assert_eq!(template.transcript(&one, &Map::new()).unwrap(), "False True True 1");
    let given = json!({"tools": [{"name": "add"}]});
    assert_eq!(template.prompt(&one, given.as_object().unwrap()).unwrap(), "True False True 1");
    assert_eq!(template.source(), source);
}
