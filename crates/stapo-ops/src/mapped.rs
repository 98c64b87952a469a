//! Memory-mapped files: weights are read straight from the page cache, and only the pages that are touched.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// A whole file, mapped read-only and privately. Derefs to its bytes.
///
/// The file must keep its length while it is mapped. If another process truncates the file, touching the lost pages
/// ends this process with `SIGBUS`; if another process overwrites the file in place, the mapped bytes change too.
/// A file that is replaced by rename (as this project writes all its files) is safe: the mapping keeps the old file.
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
        // SAFETY: the mapping is read-only and handed out only as `&[u8]`, of which every bit pattern is valid. No
        // program can rule out that another process changes the file in place; the documentation above says what
        // happens then.
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
