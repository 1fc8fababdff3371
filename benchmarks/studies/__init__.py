"""What answered a question once; its reports stand in ``docs/``, frozen ones in ``docs/studies``."""
