//! Numbers and texts as bytes, for messages between ranks: little-endian, lists with their length before them.

/// Bytes that grow.
#[derive(Debug, Default)]
pub struct Packer(pub Vec<u8>);

impl Packer {
    pub fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn number(&mut self, value: usize) {
        self.0.extend((value as u64).to_le_bytes());
    }

    pub fn float(&mut self, value: f64) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.extend(bytes);
    }

    pub fn tokens(&mut self, tokens: &[u32]) {
        self.number(tokens.len());
        self.0.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    }

    pub fn singles(&mut self, values: &[f32]) {
        self.number(values.len());
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    pub fn floats(&mut self, values: &[f64]) {
        self.number(values.len());
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
}

/// What is wrong with a message: it ended too soon, or has a value that no message has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

type Result<T> = std::result::Result<T, Malformed>;

/// Bytes that are read from the front.
#[derive(Debug)]
pub struct Unpacker<'a>(pub &'a [u8]);

impl<'a> Unpacker<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub fn number(&mut self) -> Result<usize> {
        usize::try_from(u64::from_le_bytes(self.array()?)).map_err(|_| Malformed)
    }

    pub fn float(&mut self) -> Result<f64> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    pub fn text(&mut self) -> Result<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Malformed)
    }

    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let n = self.number()?;
        self.take(n)
    }

    /// The bytes of a list whose elements have `size` bytes.
    fn list(&mut self, size: usize) -> Result<&'a [u8]> {
        let n_bytes = self.number()?.checked_mul(size).ok_or(Malformed)?;
        self.take(n_bytes)
    }

    pub fn tokens(&mut self) -> Result<Vec<u32>> {
        Ok(words(self.list(4)?).map(u32::from_le_bytes).collect())
    }

    pub fn singles(&mut self) -> Result<Vec<f32>> {
        Ok(words(self.list(4)?).map(f32::from_le_bytes).collect())
    }

    pub fn floats(&mut self) -> Result<Vec<f64>> {
        Ok(words(self.list(8)?).map(f64::from_le_bytes).collect())
    }
}

/// The words of `N` bytes that the bytes are made of.
pub fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.chunks_exact(N).map(|word| {
        let mut array = [0; N];
        array.copy_from_slice(word);
        array
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        let mut packer = Packer::default();
        packer.byte(3);
        packer.number(7);
        packer.float(-0.0);
        packer.text("naïve");
        packer.tokens(&[1, u32::MAX]);
        packer.singles(&[f32::NAN, -1.5]);
        packer.floats(&[f64::INFINITY]);
        let mut read = Unpacker(&packer.0);
        assert_eq!((read.byte(), read.number()), (Ok(3), Ok(7)));
        assert_eq!(read.float().unwrap().to_bits(), (-0.0_f64).to_bits());
        assert_eq!(read.text().unwrap(), "naïve");
        assert_eq!(read.tokens().unwrap(), [1, u32::MAX]);
        let singles = read.singles().unwrap();
        assert!(singles[0].is_nan() && singles[1] == -1.5);
        assert_eq!(read.floats().unwrap(), [f64::INFINITY]);
        assert!(read.is_empty() && read.byte() == Err(Malformed));
    }

    #[test]
    fn a_length_that_the_message_does_not_have_is_refused() {
        let mut packer = Packer::default();
        packer.number(usize::MAX / 2);
        assert_eq!(Unpacker(&packer.0).tokens(), Err(Malformed));
        assert_eq!(Unpacker(&packer.0).text(), Err(Malformed));
        assert_eq!(Unpacker(&packer.0).bytes(), Err(Malformed));
    }
}
