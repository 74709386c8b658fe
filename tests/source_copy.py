"""A copy of the sources to make mistakes in, for mutants.py and cuda/mutate.py."""
import hashlib
import subprocess


def copy_sources(root, trees, target, change=lambda name, content: content):
    """Copies what git knows of below `trees`, as it is in the working tree and after `change`. Files that are the same
    stay untouched, so that nothing is built anew for them; what is no longer there goes. Returns a digest of all but
    documents and scripts."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *trees]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {name for name in listed if (root / name).is_file()}
    digest = hashlib.sha256()
    for name in sorted(names):
        content = change(name, (root / name).read_bytes())
        if not name.endswith((".md", ".py")):
            digest.update(name.encode() + b"\0" + content + b"\0")
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in list(target.rglob("*")):
        if path.is_file() and str(path.relative_to(target)) not in names:
            path.unlink()
    return digest.hexdigest()
