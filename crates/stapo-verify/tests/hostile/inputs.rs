/// Texts made to break a grader, by name. Shared by the test and the long fuzz run.
fn hostile_inputs() -> Vec<HostileInput> {
    [large_numbers(), deep_nesting(), long_formulas(), odd_texts()].concat()
}

/// A name and a text.
type HostileInput = (&'static str, String);

const MILLION: usize = 1_000_000;

/// `inside` within `n` pairs of `open` and `close`.
fn nest(open: &str, inside: &str, close: &str, n: usize) -> String {
    format!("{}{inside}{}", open.repeat(n), close.repeat(n))
}

/// Numbers whose exact value is too large to compute or to keep.
#[allow(clippy::format_collect, reason = "a list to read, not a hot path")]
fn large_numbers() -> Vec<HostileInput> {
    vec![
        ("tower of nines", "9^9^9^9".into()),
        ("tower of nines with braces", "9^{9^{9^{9}}}".into()),
        ("tall tower", format!("2{}", "^2".repeat(5_000))),
        ("tower of factorials", format!("3{}", "!".repeat(2_000))),
        ("spaced factorials", format!("3{}", " ! ".repeat(2_000))),
        ("factorial of a million", "1000000!".into()),
        ("factorial at the limit", "4999!/4998!+4997!".into()),
        ("factorial of a power", "(10^{10})!".into()),
        ("large binomial", r"\binom{1000000}{500000}".into()),
        ("binomial at the limit", r"\binom{16000}{8000}".into()),
        ("many binomials", r"\binom{9000}{4500}+".repeat(800) + "1"),
        ("sum of factorials", "4000!+".repeat(1_500) + "1"),
        ("a million digits over a million digits", format!(r"\frac{{{}}}{{{}}}", "7".repeat(500_000), "3".repeat(500_000))),
        ("long decimal", format!("0.{}", "3".repeat(MILLION))),
        ("nineteen thousand digits squared many times", format!("({})^3", "7".repeat(18_000))),
        ("products of large numbers", vec!["7".repeat(1_000); 30].join("*")),
        ("sum of fractions with coprime denominators", (2..2_000).map(|n| format!("1/{n}+")).collect::<String>() + "1"),
        ("harmonic sum of large fractions", (1..600).map(|n| format!(r"\frac{{1}}{{{}}}+", 10_000_000_007u64 * n + 1)).collect::<String>() + "1"),
        ("huge exponent", "1e999999999999".into()),
        ("huge negative exponent", "1e-999999999999".into()),
        ("exponent at the limit", "1e8999+1e-8999".into()),
        ("power of ten tower", r"10^{10^{10}}".into()),
        ("small to a huge power", r"1.0000001^{100000000000}".into()),
        ("exponential of an exponential", r"e^{e^{e^{e^{10}}}}".into()),
        ("sine of a tower", r"\sin(9^{9^9})".into()),
        ("sine of a large number", r"\sin(10^{300})".into()),
    ]
}

/// Groups inside groups, and marks of answers repeated.
#[allow(clippy::format_collect, reason = "a list to read, not a hot path")]
fn deep_nesting() -> Vec<HostileInput> {
    vec![
        ("nested roots", nest(r"\sqrt{2+", "2", "}", 90)),
        ("deep roots", nest(r"\sqrt{", "2", "}", 6_000)),
        ("root of a large degree", r"\sqrt[1000000]{2}".into()),
        ("root of degree zero", r"\sqrt[0]{2}".into()),
        ("deep fractions", nest(r"\frac{1}{1+", "x", "}", 3_000)),
        ("continued fraction", nest(r"\frac{1}{1+", "x", "}", 90)),
        ("million braces", nest("{", "5", "}", MILLION / 2)),
        ("million open braces", "{".repeat(MILLION)),
        ("million close braces", "}".repeat(MILLION)),
        ("million parentheses", nest("(", "5", ")", MILLION / 2)),
        ("deep parentheses", nest("(", "5", ")", 7_500)),
        ("deep braces", nest("{", "5", "}", 7_500)),
        ("deep sets", nest(r"\{", "5", r"\}", 7_000)),
        ("deep tuples", nest("(1,", "5", ")", 7_000)),
        ("deep absolute values", nest("|", "x", "|", 7_500)),
        ("deep floors", nest(r"\lfloor ", "x", r"\rfloor ", 1_500)),
        ("deep text macros", nest(r"\text{", "5", "}", 5_000)),
        ("deep boxes", nest(r"\boxed{", "7", "}", 5_000)),
        ("million boxes", r"\boxed{".repeat(MILLION / 7)),
        ("many boxes", r"\boxed{6} ".repeat(100_000)),
        ("boxes never closed", r"\boxed{6 ".repeat(100_000)),
        ("many answer lines", "Answer: 6\n".repeat(100_000)),
        ("many answers", "the answer is 6 ".repeat(60_000)),
        ("blank lines before an answer", "\n ".repeat(400_000) + "the answer is 5"),
        ("a long sentence before an answer", "so that ".repeat(100_000) + "the answer is 5"),
        ("a long sentence behind an answer", "the answer is 5. Wait, ".to_owned() + &"and no ".repeat(100_000)),
        ("a long statement", "Answer: The ".to_owned() + &"number ".repeat(100_000) + "is 5"),
        ("backslashes", "\\".repeat(MILLION)),
        ("escaped braces", r"\{".repeat(MILLION / 2)),
    ]
}

/// Formulas with many signs, terms, elements or relations.
#[allow(clippy::format_collect, reason = "a list to read, not a hot path")]
fn long_formulas() -> Vec<HostileInput> {
    vec![
        ("minus signs", format!("{}7", "-".repeat(16_000))),
        ("plus-minus signs", format!("{}7", r"\pm".repeat(8_000))),
        ("independent plus-minus signs", r"1\pm".repeat(4_000) + "1"),
        ("million plus signs", "1+".repeat(MILLION / 2) + "1"),
        ("long sum", "1+".repeat(8_000) + "1"),
        ("long product", "x*".repeat(8_000) + "x"),
        ("long sum of variables", (0..1_500).map(|n| format!("x_{{{n}}}+")).collect::<String>() + "1"),
        ("high power of a sum", "(x+y+z+w+1)^{1000}".into()),
        ("nested powers of sums", nest("(", "x+y", "+1)^{9}", 40)),
        ("zip bomb of squares", nest("(", "x+1", ")^2", 60)),
        ("zip bomb of products", nest("(", "x+y", ")(a+b)", 60)),
        ("macro definitions", r"\def\a{\b\b}\def\b{\c\c}\def\c{\d\d}\a".into()),
        ("newcommand", r"\newcommand{\x}{\x\x}\x".into()),
        ("shell", r"\write18{rm -rf /}\input{/etc/passwd}".into()),
        ("python", "__import__('os').system('true')".into()),
        ("sum with many terms", r"\sum_{k=1}^{100000000} k".into()),
        ("nested sums", r"\sum_{a=1}^{400}\sum_{b=1}^{400}\sum_{c=1}^{400} abc".into()),
        ("nested products", r"\prod_{a=1}^{400}\prod_{b=1}^{400} (a+b)".into()),
        ("long list", "1,".repeat(7_500) + "2"),
        ("long list of expressions", r"\sin x+1,".repeat(250) + "y"),
        ("long set", format!(r"\{{{}\}}", (0..250).map(|n| format!(r"\sqrt{{{n}}}")).collect::<Vec<_>>().join(","))),
        ("long union", (0..250).map(|n| format!(r"(\sqrt{{{n}}},\sqrt{{{}}})", n + 1)).collect::<Vec<_>>().join(r"\cup")),
        ("large matrix", format!(r"\begin{{pmatrix}}{}\end{{pmatrix}}", r"1&2\\".repeat(3_000))),
        ("unclosed matrix", r"\begin{pmatrix}".repeat(2_000)),
        ("relations", "x<".repeat(8_000) + "y"),
        ("equalities", "x=".repeat(8_000) + "y"),
        ("ratio of many", "1:".repeat(8_000) + "2"),
        ("logarithms", nest(r"\ln(", "x", ")", 90)),
        ("sines of sines", nest(r"\sin(", "x", ")", 90)),
        ("many sines", r"\sin(x)\cos(y)".repeat(1_500)),
        ("many arc tangents", r"\arctan(x)+".repeat(2_000) + "1"),
        ("cancellation", r"\sqrt{10^{300}+1}-10^{150}".into()),
        ("almost an integer", r"e^{\pi\sqrt{163}}".into()),
        ("floor of almost an integer", r"\lfloor e^{\pi\sqrt{163}}\rfloor".into()),
        ("tangent near a pole", r"\tan(1.5707963267948966192313216916397514)".into()),
    ]
}

/// Unusual characters, repeated marks and units, words.
#[allow(clippy::format_collect, reason = "a list to read, not a hot path")]
fn odd_texts() -> Vec<HostileInput> {
    vec![
        ("unicode superscripts", format!("2{}", "⁹".repeat(5_000))),
        ("unicode fractions", "½".repeat(8_000)),
        ("combining characters", "a\u{301}".repeat(8_000)),
        ("right-to-left", "\u{202e}5\u{202c}".repeat(3_000)),
        ("null bytes", "\0".repeat(16_000)),
        ("emoji", "🤖".repeat(8_000)),
        ("commas in digits", "1,000".repeat(6_000)),
        ("thousands", format!("1{}", ",000".repeat(8_000))),
        ("digits and spaces", "1 ".repeat(8_000)),
        ("repeating block", format!(r"0.\overline{{{}}}", "142857".repeat(3_000))),
        ("subscripts", format!("x{}", "_1".repeat(8_000))),
        ("large base", "1_{99999999999}".into()),
        ("base of many digits", format!("{}_7", "6".repeat(18_000))),
        ("primes", format!("x{}", "'".repeat(16_000))),
        ("carets", "^".repeat(16_000)),
        ("percent signs", format!("5{}", "%".repeat(16_000))),
        ("degree signs", format!("5{}", "°".repeat(8_000))),
        ("units", "5 cm ".repeat(5_000)),
        ("unit powers", format!(r"5\text{{ cm}}{}", "^2".repeat(5_000))),
        ("long word", "a".repeat(MILLION)),
        ("words", "lorem ipsum ".repeat(80_000)),
        ("dollars", "$".repeat(MILLION)),
        ("stars", "*".repeat(MILLION)),
        ("gcd of large numbers", format!(r"\gcd({},{})", "7".repeat(7_500), "3".repeat(7_500))),
        ("modulus", format!(r"{} \bmod 7", "8".repeat(18_000))),
        ("hard square root", format!(r"\sqrt{{{}}}", "9".repeat(9_001))),
        ("root of a large prime product", r"\sqrt{340282366920938463463374607431768211297}".into()),
        ("many surds", (2..120).map(|n| format!(r"(\sqrt{{{n}}}+1)")).collect()),
        ("sum of surds", (2..2_000).map(|n| format!(r"+\sqrt{{{n}}}")).collect()),
        ("choose", r"{n \choose ".repeat(5_000)),
        ("times of day", "3:30 PM ".repeat(5_000)),
        ("empty", String::new()),
        ("white space", " \n\t".repeat(100_000)),
        ("nested integrals", nest(r"\int_0^1(", "x", ")dx", 1_300)),
        ("nested integrals of a sine", nest(r"\int_0^1(", r"\sin x", ")dx", 90)),
        ("integrals as bounds", nest(r"\int_0^{", "2", "}(x+x^2+x^3)dx", 40)),
        ("integral signs in a row", nest(r"\int_0^1", "x", "dx", 1_300)),
        ("headings that are none", "final answer ".repeat(75_000) + "\nx"),
        ("a statement of many words", format!("Answer: {}5", "word ".repeat(200_000))),
        ("factors of a sequence", format!(r"\sum_{{k=1}}^n {}", "a_k b_{k+1}".repeat(1_400))),
    ]
}
