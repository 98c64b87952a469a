//! Files as memory: weights are read straight from the page cache, and only the pages that are touched.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// A whole file, mapped read-only and privately. Derefs to its bytes.
///
/// The file must keep its length while it is mapped. If another process truncates it, touching the lost pages
/// ends this process with `SIGBUS`; if another process overwrites it in place, the bytes change under the reader.
/// Files that are replaced by rename (as this project writes all of its own) are safe: the mapping keeps the old file.
#[derive(Debug)]
pub struct MappedFile {
    bytes: Mmap,
}

impl MappedFile {
    /// Maps a regular file; refuses folders, pipes and devices, whose length means nothing.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the mapping is read-only and handed out only as `&[u8]`, of which every bit pattern is valid.
        // What remains is another process changing the file in place, which no program can rule out: see above.
        let bytes = unsafe { Mmap::map(&file)? };
        Ok(Self { bytes })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
