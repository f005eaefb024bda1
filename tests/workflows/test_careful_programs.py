"""Programs in Python and JavaScript that write atomically."""

from __future__ import annotations

import os

from tests.workflows.workshop import Place, workflow

REPLACE = """
import os, tempfile
for suffix in ("", ".tmp"):
    with tempfile.NamedTemporaryFile("w", dir="aidlc-docs", suffix=suffix, delete=False) as file:
        file.write("replaced by tmp" + suffix)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, "aidlc-docs/plan.md")
    print(open("aidlc-docs/plan.md").read(), sorted(os.listdir("aidlc-docs")))
with tempfile.TemporaryFile(dir="aidlc-docs") as file:
    file.write(b"never seen")
"""

WRITE_FILE_ATOMIC = """
const paths = [process.execPath.replace(/bin\\/node$/, 'lib/node_modules/npm'), '/usr/share/nodejs/npm',
  '/usr/lib/node_modules/npm', '/usr/share/nodejs'];
const write = require(require.resolve('write-file-atomic', { paths }));
write('aidlc-docs/plan.md', 'replaced', { mode: 0o640 }, (error) => {
  if (error) throw error;
  write.sync('aidlc-docs/new.md', 'made');
  console.log(require('fs').readdirSync('aidlc-docs').join());
});
"""

RENAME = """
const fs = require('fs');
const name = `aidlc-docs/plan.md.tmp.${process.pid}.${Date.now()}`;
const { mode } = fs.statSync('aidlc-docs/plan.md');
fs.writeFileSync(name, 'edited by an agent\\n', { flush: true, mode });
fs.renameSync(name, 'aidlc-docs/plan.md');
"""


@workflow()
def test_python_replaces_a_file_atomically(at: Place) -> str:
    """Python's tempfile and os.replace put a new version in place in one step."""
    return at.run("python3", "-c", REPLACE)


@workflow()
def test_node_replaces_a_file_atomically(at: Place) -> str:
    """write-file-atomic, as npm itself uses it, replaces a file and creates one."""
    said = at.run("node", "-e", WRITE_FILE_ATOMIC)
    assert at.text("aidlc-docs/plan.md") == "replaced"
    return said


@workflow()
def test_the_edit_tool_of_an_agent(at: Place) -> None:
    """Node writes NAME.tmp.PID.TIME and renames it, as the edit tools of agents do."""
    at.run("node", "-e", RENAME)
    assert at.text("aidlc-docs/plan.md") == "edited by an agent\n"
    assert at.names("aidlc-docs") == ["design.md", "latest.md", "plan.md", "units"]
    assert os.stat(at / "aidlc-docs/plan.md").st_mode & 0o777 == 0o644
