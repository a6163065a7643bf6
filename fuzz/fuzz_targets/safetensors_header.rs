//! A safetensors header of arbitrary bytes is read or refused; what is read keeps to the file.
#![no_main]

use std::path::Path;

use lapidary_weights::safetensors::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = Header::parse(bytes, Path::new("fuzz")) {
        let mut taken = 0;
        for e in &header.entries {
            assert_eq!(e.begin, taken);
            assert_eq!(e.dtype.bytes_of(&e.shape), Some(e.end - e.begin));
            taken = e.end;
        }
        assert_eq!(header.data_start + taken, bytes.len() as u64);
    }
});
