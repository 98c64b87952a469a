//! Units after a number. Known units convert into each other; unknown units are compared as words.

use crate::text::small_number;
use dashu_ratio::RBig;
use std::collections::BTreeMap;

/// A unit reduced to base units: `5 km/h` is scale 5/18 of m·s⁻¹.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Unit {
    /// How many base units one such unit is.
    pub(crate) scale: RBig,
    /// Base units with their powers; an unknown word is a new base unit.
    pub(crate) powers: BTreeMap<String, i32>,
    /// The unit as shown to people.
    pub(crate) shown: String,
    /// How many words of the unit are no known unit.
    pub(crate) n_unknown: usize,
}

impl Unit {
    pub(crate) fn is_same_kind(&self, other: &Self) -> bool {
        self.powers == other.powers
    }

    /// The product with `other ^ power`.
    pub(crate) fn times(&self, other: &Self, power: i32) -> Self {
        let mut powers = self.powers.clone();
        for (name, n) in &other.powers {
            let sum = powers.get(name).copied().unwrap_or(0).saturating_add(n.saturating_mul(power));
            powers.insert(name.clone(), sum);
        }
        powers.retain(|_, n| *n != 0);
        let scale = &self.scale * other.scale.pow(power.clamp(-6, 6) as isize);
        let joint = if self.shown.is_empty() { "" } else { " " };
        let shown = match power {
            1 => format!("{}{joint}{}", self.shown, other.shown),
            _ => format!("{}{joint}{}^{power}", self.shown, other.shown),
        };
        Self { scale, powers, shown, n_unknown: self.n_unknown + other.n_unknown }
    }

    pub(crate) fn one() -> Self {
        Self { scale: RBig::ONE, powers: BTreeMap::new(), shown: String::new(), n_unknown: 0 }
    }

    /// Whether this is a temperature in kelvin, whose sign may also stand for a thousand.
    pub(crate) fn is_kelvin(&self) -> bool {
        self.powers.len() == 1 && self.powers.get("K") == Some(&1)
    }

    /// Whether the unit counts groups, so that another number counts their members: `5 pairs`.
    pub(crate) fn is_group(&self) -> bool {
        const GROUPS: [&str; 13] = [
            "pair",
            "couple",
            "duo",
            "trio",
            "triplet",
            "quartet",
            "quadruplet",
            "quintet",
            "quintuplet",
            "sextet",
            "septet",
            "octet",
            "twin",
        ];
        self.powers.keys().any(|word| GROUPS.contains(&word.as_str()))
    }

    /// A word that is no known unit: `apples`.
    pub(crate) fn word(word: &str) -> Self {
        let base = singular(&word.to_lowercase());
        Self {
            scale: RBig::ONE,
            powers: BTreeMap::from([(base, 1)]),
            shown: word.to_lowercase(),
            n_unknown: 1,
        }
    }
}

/// The unit a word or a symbol names. Symbols are case-sensitive, words are not.
pub(crate) fn lookup(name: &str) -> Option<Unit> {
    let word = singular(&name.to_lowercase());
    if let "mph" | "kph" | "kmh" = word.as_str() {
        let length = lookup(if word == "mph" { "mile" } else { "km" })?;
        return Some(Unit { shown: word, ..length.times(&lookup("hour")?, -1) });
    }
    if let Some(unit) = derived(name).or_else(|| chinese(name)) {
        return Some(unit);
    }
    let (base, power, numerator, denominator): (&str, i32, u64, u64) = match name {
        "m" => ("m", 1, 1, 1),
        "g" => ("g", 1, 1, 1),
        "s" => ("s", 1, 1, 1),
        "h" => ("s", 1, 3600, 1),
        "L" | "l" => ("m", 3, 1, 1000),
        "mL" | "ml" => ("m", 3, 1, 1_000_000),
        "N" | "J" | "W" | "V" | "K" | "Pa" | "Hz" | "kW" | "kJ" | "kN" | "mol" | "eV" | "A" | "C" | "F"
            if derived(name).is_none() =>
        {
            let (symbol, scale) = match name.strip_prefix('k') {
                Some(rest) => (rest, 1000),
                None => (name, 1),
            };
            (symbol, 1, scale, 1)
        }
        _ => known_word(&word)?,
    };
    let scale = RBig::from_parts(numerator.into(), denominator.into());
    let powers = if base.is_empty() { BTreeMap::new() } else { BTreeMap::from([(base.to_owned(), power)]) };
    Some(Unit { scale, powers, shown: name.to_lowercase(), n_unknown: 0 })
}

/// The units of mechanics that are products of others: a newton is a kilogram metre per second squared.
fn derived(name: &str) -> Option<Unit> {
    let (powers, scale): (&[(&str, i32)], u64) = match name {
        "N" | "newton" | "newtons" => (&[("g", 1), ("m", 1), ("s", -2)], 1_000),
        "kN" => (&[("g", 1), ("m", 1), ("s", -2)], 1_000_000),
        "J" | "joule" | "joules" => (&[("g", 1), ("m", 2), ("s", -2)], 1_000),
        "kJ" => (&[("g", 1), ("m", 2), ("s", -2)], 1_000_000),
        "W" | "watt" | "watts" => (&[("g", 1), ("m", 2), ("s", -3)], 1_000),
        "kW" => (&[("g", 1), ("m", 2), ("s", -3)], 1_000_000),
        "Pa" | "pascal" | "pascals" => (&[("g", 1), ("m", -1), ("s", -2)], 1_000),
        _ => return None,
    };
    let powers = powers.iter().map(|(base, power)| ((*base).to_owned(), *power)).collect();
    Some(Unit { scale: RBig::from(scale), powers, shown: name.to_owned(), n_unknown: 0 })
}

/// Chinese units, and the words after a count with the noun they count: `5厘米`, `12元`, `12个苹果`.
fn chinese(name: &str) -> Option<Unit> {
    if name.is_ascii() {
        return None;
    }
    let (factor, name) = match name.strip_prefix("平方") {
        Some(rest) => (2, rest),
        None => name.strip_prefix("立方").map_or((1, name), |rest| (3, rest)),
    };
    let english = match name {
        "米" => "meter",
        "厘米" | "公分" => "cm",
        "毫米" => "mm",
        "分米" => "dm",
        "千米" | "公里" => "km",
        "克" => "gram",
        "千克" | "公斤" => "kg",
        "升" => "liter",
        "毫升" => "ml",
        "秒" => "second",
        "分钟" => "minute",
        "小时" => "hour",
        "天" => "day",
        "周" => "week",
        "个月" => "month",
        "年" => "year",
        "元" => "yuan",
        "美元" => "dollar",
        "度" => "degree",
        _ => "",
    };
    if !english.is_empty() {
        return Some(Unit { shown: name.to_owned(), ..Unit::one().times(&lookup(english)?, factor) });
    }
    None
}

/// Words that count in Chinese, alone or before their noun.
const CHINESE_COUNTERS: [char; 32] = [
    '个', '只', '条', '张', '本', '人', '名', '种', '次', '辆', '件', '支', '棵', '头', '匹', '台', '套',
    '组', '位', '块', '页', '步', '岁', '道', '枚', '颗', '根', '层', '间', '门', '朵', '盒',
];

pub(crate) fn is_chinese(word: &str) -> bool {
    word.contains(|c: char| ('\u{4e00}'..='\u{9fff}').contains(&c))
}

/// Whether a word after a number is Chinese and no count of things: `5的平方`, `5以上`, `5倍`.
fn is_chinese_phrase(word: &str) -> bool {
    is_chinese(word)
        && (!word.starts_with(CHINESE_COUNTERS)
            || ["的", "以上", "以下", "左右", "多", "倍", "半"].iter().any(|part| word.contains(part)))
}

fn known_word(word: &str) -> Option<(&'static str, i32, u64, u64)> {
    Some(match word {
        "meter" | "metre" => ("m", 1, 1, 1),
        "mm" | "millimeter" | "millimetre" => ("m", 1, 1, 1000),
        "cm" | "centimeter" | "centimetre" => ("m", 1, 1, 100),
        "dm" | "decimeter" | "decimetre" => ("m", 1, 1, 10),
        "km" | "kilometer" | "kilometre" => ("m", 1, 1000, 1),
        "nm" | "nanometer" => ("m", 1, 1, 1_000_000_000),
        "inch" | "in" | "inche" => ("inch", 1, 1, 1),
        "foot" | "feet" | "ft" => ("inch", 1, 12, 1),
        "yard" | "yd" => ("inch", 1, 36, 1),
        "mile" | "mi" => ("inch", 1, 63_360, 1),
        "gram" => ("g", 1, 1, 1),
        "mg" | "milligram" => ("g", 1, 1, 1000),
        "kg" | "kilogram" | "kilo" => ("g", 1, 1000, 1),
        "ton" | "tonne" => ("ton", 1, 1, 1),
        "pound" | "lb" => ("pound", 1, 1, 1),
        "ounce" | "oz" => ("ounce", 1, 1, 1),
        "second" | "sec" => ("s", 1, 1, 1),
        "ms" | "millisecond" => ("s", 1, 1, 1000),
        "minute" | "min" => ("s", 1, 60, 1),
        "hour" | "hr" => ("s", 1, 3600, 1),
        "day" => ("s", 1, 86_400, 1),
        "week" => ("s", 1, 604_800, 1),
        "month" => ("month", 1, 1, 1),
        "year" | "yr" => ("month", 1, 12, 1),
        "liter" | "litre" => ("m", 3, 1, 1000),
        "milliliter" | "millilitre" => ("m", 3, 1, 1_000_000),
        "acre" => ("acre", 1, 1, 1),
        "hectare" | "ha" => ("m", 2, 10_000, 1),
        "dollar" | "usd" | "buck" => ("dollar", 1, 1, 1),
        "cent" | "penny" | "pennie" => ("dollar", 1, 1, 100),
        "euro" | "eur" => ("euro", 1, 1, 1),
        "rs" | "inr" => return currency("rupee"),
        "yen" | "yuan" | "rmb" | "rupee" | "peso" => return currency(word),
        "degree" | "deg" => ("degree", 1, 1, 1),
        "radian" | "rad" => ("", 0, 1, 1),
        "unit" => ("unit", 1, 1, 1),
        "newton" => ("N", 1, 1, 1),
        "joule" => ("J", 1, 1, 1),
        "watt" => ("W", 1, 1, 1),
        "volt" => ("V", 1, 1, 1),
        "kelvin" => ("K", 1, 1, 1),
        "celsius" => ("C", 1, 1, 1),
        "fahrenheit" => ("F", 1, 1, 1),
        "gallon" | "gal" => ("gallon", 1, 1, 1),
        "quart" => ("quart", 1, 1, 1),
        _ => return None,
    })
}

fn currency(word: &str) -> Option<(&'static str, i32, u64, u64)> {
    ["yen", "yuan", "rmb", "rupee", "peso"]
        .into_iter()
        .find(|known| *known == word)
        .map(|name| (name, 1, 1, 1))
}

/// The factor that a word after a number names: `5 million`, `5 halves`, `2 thirds`.
pub(crate) fn scale(word: &str) -> Option<RBig> {
    let word = word.to_lowercase();
    let power = match word.as_str() {
        "dozen" | "dozens" => return Some(RBig::from(12)),
        "tens" => 1,
        "hundred" | "hundreds" => 2,
        "thousand" | "thousands" => 3,
        "lakh" | "lakhs" | "lac" | "lacs" => 5,
        "million" | "millions" => 6,
        "crore" | "crores" => 7,
        "billion" | "billions" => 9,
        "trillion" | "trillions" => 12,
        part => return part_named(part).map(|n| RBig::ONE / RBig::from(n)),
    };
    Some(RBig::from(10u8).pow(power))
}

/// The denominator that a word names: `halves`, `thirds`, `sixteenths`, `twentieths`.
fn part_named(word: &str) -> Option<i64> {
    let name = if word == "halves" { "half" } else { word.strip_suffix('s').unwrap_or(word) };
    match name {
        "half" => Some(2),
        "third" => Some(3),
        "fifth" => Some(5),
        "eighth" => Some(8),
        "ninth" => Some(9),
        "twelfth" => Some(12),
        "hundredth" => Some(100),
        "thousandth" => Some(1000),
        _ => match name.strip_suffix("ieth") {
            Some(stem) => small_number(&format!("{stem}y")),
            None => small_number(name.strip_suffix("th")?),
        }
        .filter(|n| *n > 3),
    }
}

/// The fraction that words name: `one half`, `two-thirds`, `three quarters`.
pub(crate) fn spelled_fraction(words: &str) -> Option<RBig> {
    let (count, part) = words.split_once(['-', ' '])?;
    // From twenty on a part may belong to the number before it: twenty-fifth.
    let count = small_number(count).filter(|n| (1..20).contains(n))?;
    let is_plural = part.ends_with('s');
    let parts = match part {
        "quarter" | "quarters" => 4,
        _ => part_named(part)?,
    };
    (is_plural == (count > 1)).then(|| RBig::from_parts(count.into(), parts.unsigned_abs().into()))
}

/// Words of other languages and of daily speech that multiply the number before them.
const FACTOR_WORDS: &str = "googol googolplex myriad myriads grand thou mil mils mill bil bn mn mio mrd permille promille \
    percents scores gross doz umpteen mille centaines dizaines douzaines vingt millón millon millones cientos decenas \
    docenas mila milione milioni miliardo miliardi tausend tausende hundert milliarde milliarden milliard milliards \
    millionen wan arab kharab juta ribu тыс млн млрд тысяч тысяча тысячи сотен сотни миллион миллиона миллионов миллиард \
    миллиарда миллиардов هزار लाख हज़ार करोड़ 백만 천만 만원 천원 억원 factorials inverses reciprocals opposites negatives";

/// Whether a word after a number multiplies it by something that is not worked out here.
fn is_unknown_factor(word: &str) -> bool {
    let stem = word.trim_end_matches("en").trim_end_matches('s').trim_end_matches("th");
    let is_chinese_factor = word.starts_with(['十', '百', '千', '万', '萬', '亿', '億', '兆'])
        && !["千克", "千米", "千瓦", "千卡"].contains(&word);
    // `5 twenties`, `5 tenfold`
    let is_plural_number =
        word.strip_suffix("ties").is_some_and(|stem| small_number(&format!("{stem}ty")).is_some());
    let is_fold =
        word.strip_suffix("fold").is_some_and(|stem| small_number(stem).is_some() || scale(stem).is_some());
    FACTOR_WORDS.split(' ').any(|known| known == word)
        || is_plural_number
        || is_fold
        || (stem.ends_with("illion") && scale(word).is_none())
        || is_chinese_factor
}

/// Words after a number that change its value, state a condition or take the number back.
const VALUE_WORDS: [&str; 117] = [
    "impossible",
    "choose",
    "chosen",
    "possible",
    "or",
    "more",
    "higher",
    "lower",
    "larger",
    "smaller",
    "short",
    "off",
    "approx",
    "decrease",
    "debt",
    "something",
    "anything",
    "etc",
    "unknown",
    "bps",
    "ppm",
    "ppb",
    "maybe",
    "perhaps",
    "nope",
    "hmm",
    "never",
    "neither",
    "either",
    "nor",
    "nothing",
    "nil",
    "null",
    "else",
    "otherwise",
    "instead",
    "opposite",
    "reciprocal",
    "incorrect",
    "invalid",
    "ago",
    "deficit",
    "loss",
    "tens",
    "twos",
    "ones",
    "threes",
    "fours",
    "fives",
    "fold",
    "twofold",
    "threefold",
    "ish",
    "unless",
    "quarter",
    "quarters",
    "score",
    "gross",
    "couple",
    "below",
    "above",
    "under",
    "over",
    "minus",
    "plus",
    "times",
    "negative",
    "positive",
    "less",
    "fewer",
    "greater",
    "than",
    "least",
    "most",
    "not",
    "no",
    "none",
    "zero",
    "factorial",
    "mod",
    "modulo",
    "remainder",
    "point",
    "root",
    "to",
    "from",
    "power",
    "twice",
    "double",
    "triple",
    "except",
    "without",
    "between",
    "through",
    "until",
    "but",
    "if",
    "when",
    "where",
    "for",
    "at",
    "is",
    "are",
    "by",
    "infinity",
    "billionth",
    "millionth",
    "true",
    "false",
    "wrong",
    "squared",
    "cubed",
    "inverse",
    "half",
    "divided",
    "multiplied",
    "base",
];

/// Whether a word after a number changes the value or states a condition, and so is no unit: `5 below zero`.
pub(crate) fn changes_value(word: &str) -> bool {
    let word = word.to_lowercase();
    VALUE_WORDS.contains(&word.as_str())
        || is_no_noun(&word)
        || small_number(&word).is_some()
        || is_unknown_factor(&word)
        || (is_chinese_phrase(&word) && chinese(&word).is_none())
}

/// Whether a word ends as adverbs and participles do: `5 possibly`, `5 doubled`.
fn is_no_noun(word: &str) -> bool {
    let is_participle = word.ends_with("ed") && !word.ends_with("eed") && word.len() > 4;
    is_participle || (word.ends_with("ly") && word.len() > 4)
}

/// Codes of currencies that may be before a number: `USD 18`.
pub(crate) fn is_currency_code(word: &str) -> bool {
    matches!(word, "USD" | "EUR" | "RMB" | "INR" | "Rs")
}

/// Whether a word names a time, such as `hours`.
pub(crate) fn is_time(word: &str) -> bool {
    lookup(word).is_some_and(|unit| unit.powers.keys().all(|base| matches!(base.as_str(), "s" | "month")))
}

/// Words before a noun that leave a count as it is: `5 different ways`.
pub(crate) fn is_plain_adjective(word: &str) -> bool {
    matches!(word, "different" | "distinct" | "possible" | "total" | "integer" | "real" | "such")
}

/// Words that are never a product of variables.
pub(crate) fn is_word(run: &str) -> bool {
    const WORDS: [&str; 59] = [
        "and", "or", "base", "no", "yes", "none", "per", "sq", "cu", "am", "pm", "the", "is", "of", "all",
        "real", "true", "false", "odd", "even", "east", "west", "up", "down", "left", "right", "red", "blue",
        "to", "for", "if", "not", "with", "than", "one", "two", "six", "ten", "dne", "nan", "ans", "us",
        "any", "set", "only", "in", "a", "an", "jan", "feb", "may", "june", "july", "aug", "sept", "oct",
        "nov", "dec", "dozen",
    ];
    let lower = run.to_lowercase();
    WORDS.contains(&lower.as_str()) || (run.len() > 1 && lookup(run).is_some())
}

/// `word` without a plural ending.
fn singular(word: &str) -> String {
    let cut = match word {
        "gas" | "celsius" | "s" | "ms" | "this" | "plus" | "is" => word,
        _ => match word.strip_suffix("ies") {
            Some(stem) if stem.len() > 2 => return format!("{stem}y"),
            _ => match word.strip_suffix('s') {
                Some(stem) if !stem.ends_with('s') && stem.len() > 1 => stem,
                _ => word,
            },
        },
    };
    cut.to_owned()
}
