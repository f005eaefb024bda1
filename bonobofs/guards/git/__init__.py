"""Git for agents: what changes a repository is judged by the policy, entered in the record, and done as git does it.

gate          the operations, as the shim and the command line ask for them
rules         what `[git]` of the policy demands of branches and messages
work          one operation in the making: judged, entered, done; judging makes its parts
commit, branches, switching, merging, staging, stash, looking      what each operation is
transaction   one operation alone with a repository, its locks and its effect; journal mends what was killed
repository, refs, index, worktree, conversion, signing, identity   what a repository is made of
"""
