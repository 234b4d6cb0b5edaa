"""Clients at work while a test does something else."""

import threading


class Crew:
    """Threads that go on until they are told to stop; the first failure of one is raised by `stop`."""

    def __init__(self):
        self.over, self.threads, self.failures = threading.Event(), [], []

    def start(self, work):
        def loop():
            try:
                work(self.over)
            except Exception as error:  # pylint: disable=broad-except
                self.failures.append(error)
        self.threads.append(threading.Thread(target=loop))
        self.threads[-1].start()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
