"""Whether another process still runs."""

from __future__ import annotations

import threading

from bonobofs.system.processes import is_alive, wait_for_end


def test_a_process_whose_number_a_thread_has_now_has_ended() -> None:
    """The kernel gives numbers of ended processes to threads too, and pidfd_open refuses those."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert not is_alive(thread.native_id, 1)
        assert wait_for_end(thread.native_id, 1, 0)
    finally:
        end.set()
        thread.join()
