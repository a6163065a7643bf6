//! Compiles `kernels/*.cu` with nvcc and hands the crate a table of the results.
//!
//! One fat binary a file, with machine code for every architecture in `LAPIDARY_CUDA_ARCHS` (a list such as
//! `80,89,90a,100a,120a`; `all` is exactly that list, the release's; the default is `90a`). The driver picks from
//! it what fits the device. PTX of `80` goes along with `80`, so that chips newer than the list still run. A file
//! whose name ends in `_sm90` uses instructions that only that architecture has and is compiled for it alone.
//!
//! Without feature `cuda` this does nothing. A file is compiled again when its own text, that of a header which
//! it includes, or the command has changed.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a release is compiled for.
const RELEASE: [&str; 5] = ["80", "89", "90a", "100a", "120a"];
/// What a build is compiled for unless it says otherwise.
const DAILY: &str = "90a";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["LAPIDARY_NVCC", "LAPIDARY_CUDA_ARCHS", "CUDA_HOME", "VIRTUAL_ENV"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=kernels");
    if let Err(message) = build() {
        eprintln!("{message}");
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let archs = architectures()?;
    let nvcc = find_nvcc()?;
    let version = version(&nvcc)?;
    let mut files: Vec<PathBuf> = fs::read_dir("kernels")
        .map_err(|e| format!("kernels: {e}"))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    files.sort();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1).min(files.len());
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(|| {
                while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(e) = compile(&nvcc, &version, file, &archs, &out) {
                        failed.lock().expect("no compile panics").push(e);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no compile panics");
    if !failed.is_empty() {
        return Err(failed.join("\n"));
    }
    let mut table = String::new();
    table += &format!("pub(crate) const TOOLKIT: &str = {:?};\n", version);
    table += &format!("pub(crate) const ARCHITECTURES: &[&str] = &{archs:?};\n");
    table += "pub(crate) static FAMILIES: &[Family] = &[\n";
    for file in &files {
        let name = stem(file);
        let path = out.join(format!("{name}.fatbin"));
        table += &format!("    Family {{ name: {name:?}, image: &Image(*include_bytes!({path:?})).0 }},\n");
    }
    table += "];\n";
    fs::write(out.join("images.rs"), table).map_err(|e| format!("images.rs: {e}"))
}

fn stem(file: &Path) -> String {
    file.file_stem().expect("the files were found by their extension").to_string_lossy().into_owned()
}

fn architectures() -> Result<Vec<String>, String> {
    let wanted = env::var("LAPIDARY_CUDA_ARCHS").unwrap_or_else(|_| DAILY.into());
    let archs: Vec<String> = match wanted.as_str() {
        "all" => RELEASE.map(str::to_string).to_vec(),
        list => list.split(',').map(|a| a.trim().trim_start_matches("sm_").to_string()).collect(),
    };
    let known = |a: &str| a.trim_end_matches('a').parse().is_ok_and(|n: u32| n >= 80);
    match archs.iter().find(|a| !known(a)) {
        Some(bad) => Err(format!(
            "LAPIDARY_CUDA_ARCHS: `{bad}` is no architecture from 80 up (a list such as 80,89,90a, or all)"
        )),
        None => Ok(archs),
    }
}

/// The first nvcc of: `LAPIDARY_NVCC`, `CUDA_HOME`, `PATH`, the `nvidia-cuda-nvcc` wheel of the active Python.
fn find_nvcc() -> Result<PathBuf, String> {
    let name = if cfg!(windows) { "nvcc.exe" } else { "nvcc" };
    if let Some(path) = env::var_os("LAPIDARY_NVCC").map(PathBuf::from) {
        return match path.is_file() {
            true => Ok(path),
            false => Err(format!("LAPIDARY_NVCC: {} is no file", path.display())),
        };
    }
    let mut places: Vec<PathBuf> = Vec::new();
    places.extend(env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin")));
    places.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    if let Some(packages) = site_packages() {
        // The wheels of CUDA 13 share one folder, those of 12 have one each.
        places.push(packages.join("nvidia/cu13/bin"));
        places.push(packages.join("nvidia/cuda_nvcc/bin"));
    }
    places.iter().map(|p| p.join(name)).find(|p| p.is_file()).ok_or_else(|| {
        "lapidary-cuda: feature `cuda` needs NVIDIA's compiler nvcc 12.8 or newer, and none was found in \
         LAPIDARY_NVCC, CUDA_HOME/bin, PATH or the active Python's packages.\n\
         Install the CUDA toolkit, or: pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm \
         nvidia-cuda-runtime nvidia-cuda-cccl\n\
         Running the binary needs neither, only NVIDIA's driver."
            .to_string()
    })
}

fn site_packages() -> Option<PathBuf> {
    let code = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let output = Command::new("python3").args(["-c", code]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(path.trim()))
}

/// `13.0`, of nvcc's last line but one: `Cuda compilation tools, release 13.0, V13.0.88`.
fn version(nvcc: &Path) -> Result<String, String> {
    let output = Command::new(nvcc).arg("--version").output();
    let output = output.map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let release = text.split("release ").nth(1).and_then(|t| t.split(',').next());
    release.map(str::to_string).ok_or_else(|| format!("{}: prints no release: {text}", nvcc.display()))
}

fn compile(nvcc: &Path, version: &str, file: &Path, archs: &[String], out: &Path) -> Result<(), String> {
    let name = stem(file);
    let image = out.join(format!("{name}.fatbin"));
    let (deps, stamp) = (out.join(format!("{name}.d")), out.join(format!("{name}.stamp")));
    let mut command: Vec<OsString> =
        ["-fatbin", "-O3", "-std=c++17", "--compress-mode=size", "-I", "kernels"]
            .map(OsString::from)
            .to_vec();
    let only = name.rsplit_once("_sm").map(|(_, only)| only);
    let mut any = false;
    for arch in archs.iter().filter(|a| only.is_none_or(|only| a.trim_end_matches('a') == only)) {
        any = true;
        command.push(format!("-gencode=arch=compute_{arch},code=sm_{arch}").into());
        if arch == "80" {
            command.push("-gencode=arch=compute_80,code=compute_80".into());
        }
    }
    if !any {
        return fs::write(&image, []).map_err(|e| format!("{}: {e}", image.display()));
    }
    let key = |deps: &str| -> Option<String> {
        let mut hash = DefaultHasher::new();
        (version, &command, nvcc).hash(&mut hash);
        for path in deps.split_whitespace().filter(|p| p.starts_with("kernels")) {
            (path, fs::read(path).ok()?).hash(&mut hash);
        }
        Some(format!("{:016x}", hash.finish()))
    };
    let old = fs::read_to_string(&deps).ok().and_then(|deps| key(&deps));
    if old.is_some() && old == fs::read_to_string(&stamp).ok() && image.is_file() {
        return Ok(());
    }
    let _ = fs::remove_file(&stamp);
    let mut run = Command::new(nvcc);
    run.args(&command).arg("-MD").arg("-MF").arg(&deps).arg(file).arg("-o").arg(&image);
    let output = run.output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{} does not compile:\n{said}", file.display()));
    }
    for line in said.lines().filter(|l| l.contains("warning")) {
        println!("cargo:warning={name}: {line}");
    }
    let written = fs::read_to_string(&deps).ok().and_then(|deps| key(&deps));
    fs::write(&stamp, written.unwrap_or_default()).map_err(|e| format!("{}: {e}", stamp.display()))
}
