//! Decompresses gzip and Zstandard streams, with a limit on what comes out of one file.

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{BufRead, Error, ErrorKind, Read, Result};

/// Bytes that one compressed file may decompress to. Rows stay in memory, so that a larger file would not fit anyway.
const MAX_BYTES: u64 = 64 << 30;
const GZIP: &[u8] = b"\x1f\x8b";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
/// The magic number of a skippable Zstandard frame, without its first byte, which is 0x50 to 0x5f. Parallel compressors
/// begin with one.
const SKIPPABLE: &[u8] = b"\x2a\x4d\x18";

/// The plain bytes of `source`, which may be compressed: its first bytes say so.
pub(super) fn plain<'a>(mut source: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    let start = source.fill_buf()?;
    if start.starts_with(GZIP) {
        return Ok(Box::new(limited(MultiGzDecoder::new(source), MAX_BYTES)));
    }
    let is_skippable =
        start.first().is_some_and(|byte| byte & 0xf0 == 0x50) && start[1..].starts_with(SKIPPABLE);
    if start.starts_with(ZSTD) || is_skippable {
        return Ok(Box::new(limited(Frames::new(source), MAX_BYTES)));
    }
    Ok(Box::new(source))
}

/// All bytes that a Zstandard stream decompresses to, at most `max_bytes`.
pub(super) fn unzstd(compressed: &[u8], max_bytes: usize) -> Result<Vec<u8>> {
    read_all(Frames::new(compressed), max_bytes)
}

/// All bytes that a gzip stream decompresses to, at most `max_bytes`.
pub(super) fn gunzip(compressed: &[u8], max_bytes: usize) -> Result<Vec<u8>> {
    read_all(MultiGzDecoder::new(compressed), max_bytes)
}

fn read_all(source: impl Read, max_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    limited(source, max_bytes as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn limited<R: Read>(source: R, max_bytes: u64) -> Limited<R> {
    Limited { source, max_bytes, n_bytes: 0 }
}

/// A reader that fails after `max_bytes`. A few kilobytes can decompress to terabytes.
struct Limited<R> {
    source: R,
    max_bytes: u64,
    n_bytes: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let n = self.source.read(buffer)?;
        self.n_bytes += n as u64;
        if self.n_bytes <= self.max_bytes {
            return Ok(n);
        }
        let problem = format!("decompresses to more than the limit of {} bytes", self.max_bytes);
        Err(Error::new(ErrorKind::FileTooLarge, problem))
    }
}

/// The frames of a Zstandard stream, one after the other. Parallel compressors write many, with skippable ones between.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// Whether the decoder is inside a frame.
    is_open: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), is_open: false }
    }

    /// Opens the next frame; false at the end of the stream.
    fn open(&mut self) -> Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    std::io::copy(&mut self.source.by_ref().take(length.into()), &mut std::io::sink())?;
                }
                Err(error) => return Err(corrupt(&error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        while !buffer.is_empty() {
            if !self.is_open {
                self.is_open = self.open()?;
                if !self.is_open {
                    break;
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one_block = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one_block).map_err(|error| corrupt(&error))?;
            }
            let n = self.decoder.read(buffer)?;
            if n > 0 {
                return Ok(n);
            }
            self.is_open = false;
        }
        Ok(0)
    }
}

fn corrupt(error: &FrameDecoderError) -> Error {
    Error::new(ErrorKind::InvalidData, format!("corrupt Zstandard data: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_bomb_is_refused_at_the_limit() {
        let plain = vec![0; 1 << 20];
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&plain).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
        assert!(gzip.len() < 2000 && zstd.len() < 2000);
        assert_eq!(
            (gunzip(&gzip, 1 << 20).unwrap(), unzstd(&zstd, 1 << 20).unwrap()),
            (plain.clone(), plain)
        );
        for refused in [gunzip(&gzip, (1 << 20) - 1), unzstd(&zstd, (1 << 20) - 1)] {
            let message = refused.unwrap_err().to_string();
            assert_eq!(message, "decompresses to more than the limit of 1048575 bytes");
        }
    }
}
