"""`python -m connector_tax.engine.worker_process FD PARENT`: the worker process of a service."""

from connector_tax.engine.transformer import main

if __name__ == "__main__":
    main()
