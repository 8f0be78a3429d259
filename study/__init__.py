"""What the methods do over seeds: python -m study.run. It uses dph/; nothing in dph/ knows of it."""
