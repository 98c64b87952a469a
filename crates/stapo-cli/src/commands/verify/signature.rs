//! Ed25519 signatures of receipts, as OpenSSL makes and checks them:
//! `openssl pkeyutl -verify -pubin -inkey PUBLIC -rawin -in manifest.json -sigfile manifest.sig`.

use anyhow::{Context, Result, anyhow, bail};
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use std::path::Path;

/// The longest key file that is read; a PEM key has 119 bytes.
const MAX_KEY_BYTES: u64 = 4096;

/// The signature of the bytes with the private key of a file, 64 bytes.
pub fn sign(key: &Path, bytes: &[u8]) -> Result<[u8; 64]> {
    refuse_shared(key)?;
    let read = read_key(key)?;
    let signing = if let Ok(raw) = <[u8; 32]>::try_from(read.as_slice()) {
        SigningKey::from_bytes(&raw)
    } else {
        let parsed = SigningKey::from_pkcs8_pem(&String::from_utf8_lossy(&read));
        parsed.map_err(|error| not_a_key(key, "private", "openssl genpkey -algorithm ed25519", &error))?
    };
    Ok(signing.sign(bytes).to_bytes())
}

/// Whether the signature is one of the bytes by the owner of the public key of a file.
pub fn is_right(key: &Path, bytes: &[u8], signature: &[u8]) -> Result<bool> {
    let read = read_key(key)?;
    let public = "openssl pkey -in KEY -pubout";
    let verifying = match <[u8; 32]>::try_from(read.as_slice()) {
        Ok(raw) => {
            VerifyingKey::from_bytes(&raw).map_err(|error| not_a_key(key, "public", public, &error))?
        }
        Err(_) => VerifyingKey::from_public_key_pem(&String::from_utf8_lossy(&read))
            .map_err(|error| not_a_key(key, "public", public, &error))?,
    };
    let Ok(signature) = Signature::from_slice(signature) else { return Ok(false) };
    Ok(verifying.verify_strict(bytes, &signature).is_ok())
}

fn not_a_key(key: &Path, kind: &str, command: &str, error: &dyn std::fmt::Display) -> anyhow::Error {
    anyhow!(
        "key {}: no Ed25519 {kind} key in PEM or as 32 raw bytes: {error}\nhint: {command} makes one",
        key.display()
    )
}

fn read_key(path: &Path) -> Result<Vec<u8>> {
    let named = || format!("key {}", path.display());
    let found = std::fs::metadata(path).with_context(named)?;
    if !found.is_file() || found.len() > MAX_KEY_BYTES {
        bail!("key {}: is no file of at most {MAX_KEY_BYTES} bytes", path.display());
    }
    std::fs::read(path).with_context(named)
}

/// Refuses a private key that other users of the machine can read.
#[cfg(unix)]
fn refuse_shared(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let found = std::fs::metadata(path).with_context(|| format!("key {}", path.display()))?;
    let mode = found.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        bail!(
            "key {}: its mode is {mode:o}, so others may read it\nhint: chmod 400 {}",
            path.display(),
            path.display()
        );
    }
    Ok(())
}

#[cfg(not(unix))]
fn refuse_shared(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by OpenSSL 3.0: `openssl genpkey -algorithm ed25519 -out KEY`, `openssl pkey -in KEY -pubout -out PUBLIC`,
    /// `openssl pkeyutl -sign -inkey KEY -rawin -in FILE -out SIGNATURE` of a file with the word `manifest`.
    const KEY: &str = "-----BEGIN PRIVATE KEY-----\n\
        MC4CAQAwBQYDK2VwBCIEIPpfsgtkAaLCJb29AJDpSFTaSUdXINbN0sEL6tUYBW5b\n\
        -----END PRIVATE KEY-----\n";
    const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\n\
        MCowBQYDK2VwAyEAiCFL8RPRNJx4ZKY6C9p4SE0MeXA/Oh14U9sEcZAAi8c=\n\
        -----END PUBLIC KEY-----\n";
    const SIGNED: &str = "2dd5fd971241741b1a375ea39d8fe69e829b0a7d935b83690956a9fa4b3f197a\
        5c56e8ffd3ccc5e87a4564fb7c43bba2e14bd12113d2ee8c87112dda302c8000";

    fn bytes(hex: &str) -> Vec<u8> {
        let pair = |idx| u8::from_str_radix(&hex[idx..idx + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(pair).collect()
    }

    fn private(path: &Path, content: &[u8]) {
        std::fs::write(path, content).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o400)).unwrap();
        }
    }

    #[test]
    fn signatures_are_those_of_openssl() {
        let folder = tempfile::tempdir().unwrap();
        let (key, public) = (folder.path().join("key.pem"), folder.path().join("public.pem"));
        private(&key, KEY.as_bytes());
        std::fs::write(&public, PUBLIC).unwrap();
        let signature = sign(&key, b"manifest").unwrap();
        assert_eq!(signature.to_vec(), bytes(SIGNED));
        assert!(is_right(&public, b"manifest", &signature).unwrap());
        assert!(!is_right(&public, b"manifests", &signature).unwrap());
        assert!(!is_right(&public, b"manifest", &signature[1..]).unwrap());
    }

    /// The first test of RFC 8032, section 7.1: the empty message.
    #[test]
    fn raw_keys_give_the_signature_of_the_standard() {
        let folder = tempfile::tempdir().unwrap();
        let (key, public) = (folder.path().join("key"), folder.path().join("public"));
        private(&key, &bytes("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"));
        let raw = bytes("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
        std::fs::write(&public, raw).unwrap();
        let signature = sign(&key, b"").unwrap();
        let expected = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b";
        assert_eq!(signature.to_vec(), bytes(expected));
        assert!(is_right(&public, b"", &signature).unwrap());
    }

    #[cfg(unix)]
    #[test]
    fn a_private_key_that_any_other_user_can_use_signs_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key.pem");
        std::fs::write(&key, KEY).unwrap();
        let signed = |mode: u32| {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            sign(&key, b"x").map(drop).map_err(|error| error.to_string())
        };
        assert_eq!([signed(0o400), signed(0o600)], [Ok(()), Ok(())]);
        for mode in [0o440, 0o404, 0o620, 0o602, 0o610, 0o601] {
            let refused = signed(mode).unwrap_err();
            assert!(refused.contains(&format!("its mode is {mode:o}, so others may")), "{refused}");
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let public = folder.path().join("public.pem");
        let read = |content: &[u8]| {
            std::fs::write(&public, content).unwrap();
            is_right(&public, b"", &[0; 64]).map_err(|error| error.to_string())
        };
        assert!(read(&[7; 4096]).unwrap_err().contains("no Ed25519 public key"));
        assert!(read(&[7; 4097]).unwrap_err().contains("is no file of at most 4096 bytes"));
        assert!(read(KEY.as_bytes()).unwrap_err().contains("no Ed25519 public key"));
        assert!(read(&[7; 31]).unwrap_err().contains("no Ed25519 public key"));
        assert!(is_right(folder.path(), b"", &[0; 64]).is_err(), "a folder");
    }
}
