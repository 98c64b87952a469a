/// Counter-based random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len())]
    }

    /// A text of one of four kinds: a sensible expression, pieces in a row, random characters, a mutated expression.
    pub fn text(&mut self) -> String {
        match self.below(8) {
            0..=2 => self.expression(0),
            3 | 4 => {
                let n = 1 + self.below(24);
                (0..n).map(|_| self.pick(&FRAGMENTS)).collect()
            }
            5 => {
                let n = self.below(40);
                (0..n).map(|_| char::from_u32(self.next() as u32 % 0x2_3000).unwrap_or('\\')).collect()
            }
            _ => {
                let text = self.expression(0);
                self.mutated(&text)
            }
        }
    }

    pub fn expression(&mut self, depth: usize) -> String {
        if depth > 4 {
            return self.pick(&LEAVES).to_owned();
        }
        let pattern = self.pick(&PATTERNS);
        let mut text = String::new();
        for part in pattern.split('@') {
            if !text.is_empty() || pattern.starts_with('@') {
                let skipped = self.below(3);
                let inner = self.expression(depth + 1 + skipped);
                text.push_str(&inner);
            }
            text.push_str(part);
        }
        text
    }

    /// `text` with a few characters removed, doubled, swapped or replaced.
    pub fn mutated(&mut self, text: &str) -> String {
        let mut chars: Vec<char> = text.chars().collect();
        for _ in 0..=self.below(3) {
            if chars.is_empty() {
                break;
            }
            let at = self.below(chars.len());
            match self.below(4) {
                0 => {
                    chars.remove(at);
                }
                1 => chars.insert(at, chars[at]),
                2 => chars[at] = self.pick(&FRAGMENTS).chars().next().unwrap_or('0'),
                _ => {
                    let other = self.below(chars.len());
                    chars.swap(at, other);
                }
            }
        }
        chars.into_iter().collect()
    }
}

/// Expressions with holes.
const PATTERNS: [&str; 92] = [
    "x@", "@+@", "@-@", "@ \\cdot @", "@/@", "\\frac{@}{@}", "\\sqrt{@}", "\\sqrt[3]{@}", "@^2", "@^{@}", "(@)", "|@|",
    "\\lfloor @ \\rfloor", "\\sin(@)", "\\ln(@)", "\\log_2(@)", "@!", "\\binom{@}{2}", "(@,@)", "[@,@)", "\\{@,@\\}",
    "@,@", "x=@", "@=@", "x<@", "@\\le x<@", "(@,@)\\cup(@,@)", "@\\pm@", "@:@", "@\\%", "@^\\circ", "@\\text{ cm}",
    "\\$@", "\\begin{pmatrix}@\\\\@\\end{pmatrix}", "e^{@}", "@i", "@\\pi", "\\arctan @", "@_7", "x=@ \\text{ or } x=@",
    "x=@ \\quad y=@", "x=@ x=@", "@\\approx @", "\\{x|x>@\\}", "{@ \\over @}", "@\\hat{i}+@\\hat{j}", "C_{@}^{@}", "(@)_2",
    "@^\\circ @'", "x:y=@:@", "x=@,y=@;x=@,y=@", "A(@,@)", "|x|<@", "\\mathbb R\\setminus\\{@,@\\}", "(@,@)\\cap(@,@)",
    "\\begin{vmatrix}@&@\\\\@&@\\end{vmatrix}", "\\begin{cases}x=@\\\\y=@\\end{cases}", "@+C", "@k, k\\in\\mathbb Z",
    "@ (n\\ge @)", "x\\ne @, x\\ne @", "\\frac{dy}{d@}", "@ dozen", "\\angle @",
    "\\begin{cases}@&x>@\\\\@&\\text{otherwise}\\end{cases}", "{}_{@}C_{@}", "\\begin{pmatrix}@&@\\\\@&@\\end{pmatrix}\\begin{pmatrix}@\\\\@\\end{pmatrix}",
    "\\begin{pmatrix}@&@\\\\@&@\\end{pmatrix}^2+@\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}", "\\sum_{k=1}^{n} @", "\\sum_{k=0}^\\infty \\frac{@}{@^k}",
    "\\sum_{k=0}^\\infty \\frac{x^k}{k!}", "\\prod_{k=1}^{@} @k", "\\int_0^{@} @x^2 dx", "\\int_1^\\infty @x^{-2} dx", "x=@+k\\pi", "@ \\text{ cm}<x<@ \\text{ cm}",
    "1\\le|z|\\le @", "\\{z:|z|<@\\}", "(A) @ or (B) @", "\\boxed{@ \\boxed{@}}", "@e8", "@ \\times 10^8", "\\sum_{k=1}^{n} a_k @",
    "\\sum_{k=@}^\\infty a_{k+1}b_{n-k} @", "Answer: she left @ hours ago.", "]@,@[", "0.\\dot{1}@\\dot{7}", "2024-0@-0@", "\\int_@^{@} (@x+@)e^{-@x} dx", "\\int_0^{@} @\\sin(@x) dx", "\\\\frac{@}{@}", "@ perhaps",
];

const LEAVES: [&str; 24] = [
    "0", "1", "2", "3", "7", "10", "100", "0.5", "1.25", "-1", "x", "y", "n", "\\pi", "e", "i", "\\infty", "1,000",
    "\\frac12", "0.\\overline{3}", "1e-5", "12345678901234567890", "a_1", "\\alpha",
];

const FRAGMENTS: [&str; 122] = [
    "\\left\\{\\begin{array}{l}", "\\end{array}\\right.", "\\mathbb{N}^*", "\\mathbb{R}^+", "\\det", "\\quadx", "f\\circ g", "\\vec{a}\\times", " for all x", "x_1=2,x_2=3", "P(X\\le2)=", "[[1,2],[3,4]]", "C_n^2", "\\mid k\\in\\mathbb Z\\}", "-\\{1\\}", "\\otimes",
    "\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\left", "\\right", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "&", "{",
    "}", "(", ")", "[", "]", "\\{", "\\}", "|", "^", "_", "!", "%", "\\%", "\\$", "$", "+", "-", "*", "/", "=", "<", ">",
    "\\le", "\\pm", "\\cup", "\\in", ",", ";", ":", ".", "...", " ", "\n", "0", "1", "9", "12", "007", "3.14", "1e9", "x",
    "y", "e", "i", "\\pi", "\\infty", "\\sin", "\\log", "\\ln", "\\lfloor", "\\rfloor", "\\binom", "\\sum", "\\overline{",
    "½", "²", "√", "−", "Answer:", "the answer is", "\\circ",
    "\\quad", "\\over", "\\setminus", "\\cap", "\\lor", "\\angle", "\\hat", "\\begin{cases}", "\\end{cases}", "\\mathrm{d}",
    "</think>", "<answer>", "</answer>", "答案", "'", "halves",
    "\\int", "\\prod", "\\sum_{k=1}^", "dx", "\\infty", "{}_", "^T", "\\begin{aligned}", "\\end{aligned}", "\\\\le", "𝟯", "𝑥", "\\cancel{", "\\underbrace{", " is ", "if", "otherwise", "lakh",
];
