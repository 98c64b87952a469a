use super::*;
use minijinja::context;

const LIMITS: Limits = Limits { steps: 600_000, work_bytes: 64 << 20, output_bytes: 1 << 20 };

/// What the engine makes of a template without guards.
fn unguarded(source: &str, variables: &Value) -> String {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.render_str(source, variables.clone()).unwrap()
}

fn variables() -> Value {
    context! {
        messages => vec![
            context! { role => "system", content => "Be\u{1b} brief.\n\nTwo." },
            context! { role => "user", content => "<think>a</think>\n 1 + 1? é😀" },
            context! { role => "assistant", content => "<think>\nb\n</think>\n\n2" },
        ],
        add_generation_prompt => true,
        bos_token => "<s>",
        n => 3,
        half => 0.5,
        tools => Vec::<Value>::new(),
    }
}

#[test]
fn guards_change_no_result() {
    let sources = [
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}",
        "{%- for m in messages -%}\n  {%- if loop.first and m.role != 'system' -%}x{%- elif m.role == 'user' -%} {{ m.content | trim }} {%- else -%} {{ loop.index0 }} {%- endif -%}\n{%- endfor -%}",
        "{% set ns = namespace(found=false, last=messages|length - 1) %}{% for m in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 %}{% if not ns.found and m.role == 'user' and m.content is string and not(m.content.startswith('<tool>')) %}{% set ns.found = true %}{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }} {{ ns.found }}",
        "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{{ c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}|{{ c.split('</think>')[-1].lstrip('\n') }}{% endif %}{% endfor %}",
        "{{ messages[0].content if messages[0]['role'] == 'system' else 'none' }}{% if tools %}x{% endif %}{{ tools is defined }}",
        "{% macro turn(m, sep='|') %}{{ m.role }}{{ sep }}{{ m.content|upper }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{{ turn(m, sep='-') }}{% endfor %}",
        "{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}{{ bos_token }}{% endcall %}",
        "{% set text %}a {{ n }} b{% endset %}{{ text }}{{ text|length }}{% filter upper %}x{{ text }}{% endfilter %}",
        "{{ n + 1 }} {{ n * 2 }} {{ n / 2 }} {{ n // 2 }} {{ n % 2 }} {{ n ** 2 }} {{ -n }} {{ half + n }} {{ 'ab' * n }} {{ [1, 2] * 2 }} {{ (1, 2) + (3,) }}",
        "{{ 1 < n < 5 }} {{ n >= 3 }} {{ n <= 2 }} {{ n > 2 }} {{ n != 3 }} {{ 2 in [1, 2] }} {{ 2 not in [1, 2] }} {{ 'a' in 'cat' }} {{ not n }} {{ n and 0 or 'x' }}",
        "{{ [1, 2] + [3] }} {{ ([1, 2] + [3])[1:] }} {{ 'hello'[1:3] }} {{ 'hello'[-1] }} {{ [1, 2, 3][::2] }} {{ messages[1:]|length }} {{ {'a': 1, 'b': [2]} }} {{ (1, 'x') }}",
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% for k in {'a': 1} %}{{ k }}{% endfor %}{{ {'a': 1}|items|list }}{{ {'b': 1, 'a': 2}|dictsort }}",
        "{% for i in range(10) if i is odd %}{% if i == 7 %}{% break %}{% endif %}{% if i == 3 %}{% continue %}{% endif %}{{ i }}{{ loop.last }}{% else %}none{% endfor %}",
        "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
        "{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [3, 1, 2]|sort|reverse|list }} {{ [1, 1, 2]|unique|list }} {{ range(7)|batch(3)|list }}",
        "{{ 'a,b'.split(',') }} {{ 'aXb'.replace('X', '-') }} {{ 'aXb'|replace('X', '-') }} {{ '{} {name}'.format(1, name='x') }} {{ '%s %05.1f'|format('x', 2) }} {{ 'a\nb'|indent(2) }} {{ ' x '.strip() }} {{ 'title case'|title }}",
        "{{ missing }}{{ missing is defined }}{{ missing|default('d') }}{{ none }}{{ true }}{{ half }}{{ 1e30 }}{{ 12345678901234567890 }}",
        "{% with a = 1, b = n %}{{ a + b }}{% endwith %}{% set a, b = [1, 2] %}{{ b }}{{ a }}{% do messages[0].content.strip() %}",
        "{{ 'x' ~ n ~ [1] ~ none }}{% raw %}{{ not }}{% endraw %}{# comment #}{{- ' tight ' -}}",
        "{% if n == 1 %}a{% elif n == 2 %}b{% elif n == 3 %}c{% else %}d{% endif %}{{ 'y' if n > 5 }}{{ dict(a=1, b=2).a }}{{ [n, 4]|sum }}{{ [n, 4]|max }}{{ 'b'|first }}",
        "{% for m in messages %}{{ loop.previtem is defined }}>{{ loop.nextitem is defined }}{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role) }}{{ loop.revindex }}{% endfor %}",
    ];
    let variables = variables();
    for source in sources {
        let template = Template::new(source.to_owned(), Dialect::Chat).unwrap();
        assert_eq!(template.render(&variables, LIMITS).unwrap(), unguarded(source, &variables), "{source}");
    }
}

#[test]
fn the_budget_is_of_one_rendering_and_its_bounds_are_exact() {
    let template = Template::new("{{ x }}".into(), Dialect::Prompt).unwrap();
    let variables = context! { x => "a".repeat(1000) };
    let bytes = |work_bytes, output_bytes| {
        template.render(&variables, Limits { work_bytes, output_bytes, ..LIMITS }).map(|text| text.len())
    };
    for _ in 0..3 {
        assert_eq!(bytes(1064, 1000), Ok(1000));
    }
    assert!(bytes(1063, 1000).unwrap_err().problem.contains("too large"));
    assert!(bytes(1064, 999).unwrap_err().problem.contains("writes 1000 bytes, at most 999"));
}

/// Two of these renderings make more lists than one may, and each would see what another has set.
#[test]
fn renderings_together_are_as_each_alone() {
    let source =
        "{{ seen is defined }}{% set seen = x %}{% for n in range(x) %}{% set a = [n] %}{% endfor %}{{ x }}";
    let template = Template::new(source.into(), Dialect::Prompt).unwrap();
    let renderings: Vec<(Value, Limits)> = [6000, 1, 6000].map(|x| (context! { x }, LIMITS)).into();
    let alone = renderings.iter().map(|(variables, limits)| template.render(variables, *limits));
    let together = template.render_all(&renderings).unwrap();
    assert_eq!(alone.collect::<Result<Vec<_>, _>>().unwrap(), together);
    assert_eq!(together, ["False6000", "False1", "False6000"]);
    let too_many = template.render(&context! { x => 10_001 }, LIMITS).unwrap_err().problem;
    assert!(too_many.contains("too many lists"), "{too_many}");
    let tight = [renderings, vec![(context! { x => 6000 }, Limits { steps: 100, ..LIMITS })]].concat();
    assert!(template.render_all(&tight).unwrap_err().problem.contains("fuel"));
}

#[test]
fn a_prompt_needs_its_variables_and_keeps_its_last_line_break() {
    let render = |source: &str| {
        Template::new(source.into(), Dialect::Prompt).unwrap().render(&context! { x => 1 }, LIMITS)
    };
    assert_eq!(render("{{ x }}\n\n").unwrap(), "1\n\n");
    assert_eq!(render("{{ y|default(2) }}{{ y is defined }}").unwrap(), "2False");
    for source in ["{{ y }}", "{{ y ~ 'a' }}", "{{ y + 1 }}", "{{ y.z }}", "{% for a in y %}{% endfor %}"] {
        assert!(render(source).unwrap_err().problem.contains("undefined"), "{source}");
    }
}

#[test]
fn errors_name_the_line_of_the_template() {
    let refused = |source: &str| {
        Template::new(source.into(), Dialect::Chat)
            .and_then(|t| t.render(&variables(), LIMITS))
            .unwrap_err()
            .problem
    };
    assert!(refused("a\nb\n{{ 1 + 'x' }}").contains("line 3"));
    assert!(
        refused("a\n{% for m in messages %}\nx\n{{ m.content.nothing() }}{% endfor %}").contains("line 4")
    );
}

/// As `json.dumps` of Python writes it with `ensure_ascii=False`.
#[test]
fn json_is_written_as_by_python() {
    let render = |source: &str| {
        Template::new(source.into(), Dialect::Prompt).unwrap().render(&context! { x => "é\"\n" }, LIMITS)
    };
    let value = "{'a': [1, {'b': none}], 'c': x, 'd': [], 'e': {}, 'f': 0.5, 'g': true}";
    let flat = r#"{"a": [1, {"b": null}], "c": "é\"\n", "d": [], "e": {}, "f": 0.5, "g": true}"#;
    assert_eq!(render(&format!("{{{{ {value}|tojson }}}}")).unwrap(), flat);
    let indented = "{\n  \"a\": [\n    1,\n    {\n      \"b\": null\n    }\n  ],\n  \"d\": []\n}";
    let value = "{'a': [1, {'b': none}], 'd': []}";
    assert_eq!(render(&format!("{{{{ {value}|tojson(indent=2) }}}}")).unwrap(), indented);
    let wide = |n: usize| render(&format!("{{{{ [1]|tojson(indent={n}) }}}}")).unwrap().len();
    assert_eq!([wide(16), wide(17), wide(1_000_000)], [5 + 16; 3], "an indentation is 16 wide at most");
    let nested = |n: usize| render(&format!("{{{{ {}1{}|tojson }}}}", "[".repeat(n), "]".repeat(n)));
    assert_eq!(nested(64).unwrap().len(), 129);
    assert!(nested(65).unwrap_err().problem.contains("nested too deep"));
    assert!(render("{{ y|default(none)|tojson }}").is_ok());
    assert!(render("{{ [1]|tojson(separators=1) }}").is_err(), "an option that is not known");
}

#[test]
fn literals_are_written_out_up_to_a_length() {
    let check =
        |source: String| Template::new(source, Dialect::Chat).map(drop).map_err(|refused| refused.problem);
    let list = |n: usize| check(format!("{{{{ [{}] }}}}", vec!["1"; n].join(",")));
    assert_eq!(list(4096), Ok(()));
    assert!(list(4097).unwrap_err().contains("more than 4096 items"));
    assert_eq!(check("{{ 'ab' * 2048 }}".into()), Ok(()));
    assert!(check("{{ 'ab' * 2049 }}".into()).unwrap_err().contains("more than 4096 bytes"));
    assert!(check("{{ 2049 * 'ab' }}".into()).unwrap_err().contains("more than 4096 bytes"));
    assert_eq!(check("{{ 1000000 * 1000000 }}".into()), Ok(()));
    let longest = " ".repeat(MAX_TEMPLATE_BYTES);
    assert_eq!(check(longest.clone()), Ok(()));
    assert!(check(longest + " ").unwrap_err().contains("262145 bytes"));
}
