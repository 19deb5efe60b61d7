from threading import Thread

from lightning_ups._compat.thread_stack import ThreadStack


def test_contexts_close_in_any_order_and_threads_have_their_own():
    stack, seen = ThreadStack(), []
    one, other = [], []  # equal, and not the same
    first, second = stack.holding(one), stack.holding(other)
    first.__enter__(), second.__enter__()
    thread = Thread(target=lambda: seen.append(stack.innermost))
    thread.start()
    thread.join()
    assert seen == [None]
    first.__exit__(None, None, None)
    assert stack.innermost is other
    second.__exit__(None, None, None)
    assert stack.values == []
