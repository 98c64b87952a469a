//! The pages of a Parquet file, decompressed here and not by the Parquet crate: its Zstandard is a C library, its
//! choice of codecs is fixed when it is compiled, and it does not limit what a page decompresses to. The crate reads
//! pages as if they were not compressed, and this module decompresses what it returns.

use crate::tasks::rows::compressed::{gunzip, unzstd};
use lz4_flex::block::{DecompressError, decompress_into};
use parquet::basic::Compression;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::{SerializedFileReader, SerializedPageReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use std::fs::File;
use std::sync::Arc;

/// Bytes that one page may decompress to. Writers make pages of about a megabyte.
const MAX_PAGE_BYTES: usize = 1 << 30;

/// The column chunks of a file.
pub(super) struct Chunks {
    file: Arc<File>,
    metadata: ParquetMetaData,
}

impl Chunks {
    pub(super) fn open(file: File) -> Result<Self> {
        let metadata = SerializedFileReader::new(file.try_clone()?)?.metadata().clone();
        Ok(Self { file: Arc::new(file), metadata })
    }

    pub(super) fn n_groups(&self) -> usize {
        self.metadata.num_row_groups()
    }

    pub(super) fn group(&self, group_idx: usize) -> Group<'_> {
        Group { file: &self.file, metadata: self.metadata.row_group(group_idx) }
    }
}

/// The column chunks of a row group.
pub(super) struct Group<'a> {
    file: &'a Arc<File>,
    metadata: &'a RowGroupMetaData,
}

impl RowGroupReader for Group<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.metadata.num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> Result<Box<dyn PageReader>> {
        let column = self.metadata.column(i);
        let stored = column.clone().into_builder().set_compression(Compression::UNCOMPRESSED).build()?;
        let n_rows = usize::try_from(self.metadata.num_rows())?;
        Ok(Box::new(PlainPages {
            stored: SerializedPageReader::new(self.file.clone(), &stored, n_rows, None)?,
            compression: column.compression(),
            chunk_bytes: usize::try_from(column.uncompressed_size()).unwrap_or(0),
        }))
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&parquet::bloom_filter::Sbbf> {
        None
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

/// The decompressed pages of a column chunk.
struct PlainPages {
    stored: SerializedPageReader<File>,
    compression: Compression,
    /// The size of the whole chunk as the file says it; a first guess where a page does not name its size.
    chunk_bytes: usize,
}

impl PlainPages {
    fn plain(&self, mut page: Page) -> Result<Page> {
        if self.compression == Compression::UNCOMPRESSED {
            return Ok(page);
        }
        let (buffer, n_levels) = match &mut page {
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => (buf, 0),
            Page::DataPageV2 { is_compressed: false, .. } => return Ok(page),
            // The levels of such a page are never compressed.
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => {
                (buf, *def_levels_byte_len as usize + *rep_levels_byte_len as usize)
            }
        };
        let (levels, values) =
            buffer.split_at_checked(n_levels).ok_or_else(|| corrupt("levels behind the end of a page"))?;
        let mut plain = levels.to_vec();
        // A page without values has nothing to decompress.
        if !values.is_empty() {
            plain.extend(self.decompress(values)?);
        }
        *buffer = plain.into();
        Ok(page)
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        match self.compression {
            Compression::SNAPPY => unsnap(bytes),
            Compression::GZIP(_) => Ok(gunzip(bytes, MAX_PAGE_BYTES)?),
            Compression::ZSTD(_) => Ok(unzstd(bytes, MAX_PAGE_BYTES)?),
            Compression::LZ4_RAW => unlz4(bytes, self.chunk_bytes),
            // The older LZ4 has sizes around its blocks, or none, depending on the writer.
            Compression::LZ4 => unlz4_blocks(bytes).or_else(|_| unlz4(bytes, self.chunk_bytes)),
            other => Err(corrupt(&format!(
                "compressed with {other}, which is not read; write the file with zstd or snappy"
            ))),
        }
    }
}

impl PageReader for PlainPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.stored.get_next_page()?.map(|page| self.plain(page)).transpose()
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.stored.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.stored.skip_next_page()
    }
}

impl Iterator for PlainPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

fn unsnap(bytes: &[u8]) -> Result<Vec<u8>> {
    let fail = |error: snap::Error| corrupt(&error.to_string());
    if snap::raw::decompress_len(bytes).map_err(fail)? > MAX_PAGE_BYTES {
        return Err(too_large());
    }
    snap::raw::Decoder::new().decompress_vec(bytes).map_err(fail)
}

/// Decompresses an LZ4 block, which does not name its size: the buffer grows until the block fits.
fn unlz4(bytes: &[u8], expected_bytes: usize) -> Result<Vec<u8>> {
    let mut plain = vec![0; expected_bytes.clamp(bytes.len(), MAX_PAGE_BYTES)];
    loop {
        match decompress_into(bytes, &mut plain) {
            Ok(n_bytes) => {
                plain.truncate(n_bytes);
                return Ok(plain);
            }
            Err(DecompressError::OutputTooSmall { .. }) if plain.len() < MAX_PAGE_BYTES => {
                plain = vec![0; (2 * plain.len()).min(MAX_PAGE_BYTES)];
            }
            Err(DecompressError::OutputTooSmall { .. }) => return Err(too_large()),
            Err(error) => return Err(corrupt(&error.to_string())),
        }
    }
}

/// Decompresses Hadoop's LZ4: blocks, each after its plain size and its compressed size.
fn unlz4_blocks(mut bytes: &[u8]) -> Result<Vec<u8>> {
    let short = || corrupt("an LZ4 block is cut off");
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        let (sizes, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
        let size =
            |at: usize| u32::from_be_bytes([sizes[at], sizes[at + 1], sizes[at + 2], sizes[at + 3]]) as usize;
        let (n_plain, n_stored) = (size(0), size(4));
        let block = rest.get(..n_stored).ok_or_else(short)?;
        if plain.len() + n_plain > MAX_PAGE_BYTES {
            return Err(too_large());
        }
        let start = plain.len();
        plain.resize(start + n_plain, 0);
        let written =
            decompress_into(block, &mut plain[start..]).map_err(|error| corrupt(&error.to_string()))?;
        if written != n_plain {
            return Err(short());
        }
        bytes = &rest[n_stored..];
    }
    Ok(plain)
}

fn corrupt(problem: &str) -> ParquetError {
    ParquetError::General(problem.to_string())
}

fn too_large() -> ParquetError {
    corrupt(&format!("a page decompresses to more than the limit of {MAX_PAGE_BYTES} bytes"))
}
